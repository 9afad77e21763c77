"""Streams and networks that were passed as objects: what a runner must check and say before it trains with them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from selfless import data
from selfless.network import given
from selfless.spec import Run


def check_objects(runs: Sequence[Run]) -> None:
    """Raise ValueError if an object has changed since its run was made. Say which networks cannot be named."""
    for stream in {run.stream for run in runs}:
        data.check_unchanged(stream)
    for model in sorted({run.model for run in runs}):
        given.check_unchanged(model)
        if given.is_unnamed(model):
            warnings.warn(
                f"the network {model.split(':')[1]} cannot be imported by name, so it is trained each time and its records are not looked "
                "up; put it into a module (mynet.py) to have it cached",
                stacklevel=4,
            )


def can_travel(runs: Sequence[Run]) -> bool:
    """Return True if worker processes can load what the runs need; say so if they cannot."""
    held = sorted({name for run in runs for name in (run.stream, run.model) if name.removeprefix("joint-").startswith(given.PREFIX)})
    if held:
        warnings.warn(
            f"{held[0]} was passed as an object, which worker processes cannot load: all runs train in this process (workers=1)",
            stacklevel=5,
        )
    return not held
