"""Streams and networks that were passed as objects: checks, warnings, and streams as files for worker processes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from selfless import data
from selfless.network import given
from selfless.spec import Run

_UNPACKED: dict[str, data.Stream] = {}  # in a worker process: the streams of its parent


def check_objects(runs: Sequence[Run]) -> None:
    """Raise ValueError if an object has changed since its run was created. Warn about networks that cannot be named."""
    for stream in {run.stream for run in runs}:
        data.check_unchanged(stream)
    for model in sorted({run.model for run in runs}):
        given.check_unchanged(model)
        if given.is_unnamed(model):
            warnings.warn(
                f"{given.network_title(model)} cannot be imported by name, so it is trained each time, in this process, and its records "
                "are not looked up; put a function that makes it into a module (mynet.py) and pass that: model=mynet.build",
                stacklevel=4,
            )


def can_travel(runs: Sequence[Run]) -> bool:
    """Return True if worker processes can build the networks of the runs; warn if they cannot."""
    held = sorted({run.model for run in runs if run.model.startswith(given.PREFIX)})
    if held and not given.is_unnamed(held[0]):  # `check_objects` warned about the others
        warnings.warn(
            f"{given.network_title(held[0])} was passed as an object, which worker processes cannot build: all runs train in this "
            "process; put a function that makes it into a module (mynet.py) to use every core",
            stacklevel=5,
        )
    return not held


def pack_streams(runs: Sequence[Run], folder: Path) -> dict[str, str]:
    """Write the streams that were passed as objects, for worker processes; return {name: folder}."""
    found = {name: data.name_stream(name)[1] for name in {run.stream.removeprefix("joint-") for run in runs}}
    packed = {name: folder / str(i) for i, (name, stream) in enumerate(found.items()) if stream is not None}
    for name, place in packed.items():
        data.write_stream(found[name], place)  # type: ignore[arg-type]  # not None
    return {name: str(place) for name, place in packed.items()}


def unpack_streams(packed: Mapping[str, str]) -> None:
    """Make the streams that another process wrote known in this one, for as long as it runs."""
    for name, place in packed.items():
        if name not in _UNPACKED:
            _UNPACKED[name] = data.read_stream(Path(place))
            data.name_stream(_UNPACKED[name])
