"""Streams by name: `permuted-mnist`, `joint-split-cifar-100`, `objects:flowers,birds`, `folders:PATH`, `arrays:PATH.npz`.

How to add
    a kind of stream (`KIND-mnist`)       a function in `streams.py`, and a row in its table `KINDS`
    a data source (`permuted-NAME`)       a module in `sources/`, and a row in `CATALOGUE` (`sources/__init__.py`)
    an object set (`objects:NAME`)        a module in `sources/objects/`, and a row in `OBJECTS` (`sources/objects/__init__.py`)
    a stream that is none of these        a function here, and a row in `OTHER_STREAMS` below
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from selfless.data.cache import load
from selfless.data.custom import from_arrays, from_datasets, from_folders, from_npz
from selfless.data.given import given_stream
from selfless.data.object_stream import objects_stream, parse_names
from selfless.data.paths import Place
from selfless.data.sources import CATALOGUE, Source, per_channel, suggest
from selfless.data.streams import KINDS, grouped
from selfless.data.tasks import Stream, joint, limit_images

Options = dict[str, Any]


def stream_names() -> tuple[str, ...]:
    """Return every KIND-SOURCE. Each of them, and `objects`, can have `joint-` before it."""
    return tuple(f"{kind}-{source}" for kind in KINDS for source in CATALOGUE)


def stream(
    name: str | Any,
    tests: Any = None,
    /,
    *,
    tasks: int | None = None,
    seed: int = 0,
    held_out: float = 0.0,
    limit: int | None = None,
    data_dir: Place = None,
    download: bool = True,
    shape: tuple[int, int, int] | None = None,
    **options: Any,
) -> Stream:
    """Make the stream of that name, or of a list of tasks: `stream([(train, test), …])`; see `from_datasets`.

    The same name, options and seed give the same stream on every machine.

    tests      the test sets of all tasks, if the first argument is only the training sets: `stream(scenario_train, scenario_test)`
    tasks      how many; None: the default of the stream
    held_out   the share of the training images of each class that is set aside for choosing hyperparameters
    limit      keep at most this many images of each part of each task
    download   False: never use the network
    shape      the (C, H, W) that images of folders get unless `size` and `channels` are given
    options    further options of the kind of stream, such as `classes_per_task=5`; `mean` and `std` of a data set's pixels in [0, 1]
    """
    given = {"seed": seed, "held_out": held_out, **({} if tasks is None else {"tasks": tasks}), **options}
    if not isinstance(name, str):
        _check_options("of data sets", given, from_datasets)
        made = from_datasets(name, tests, **given)
        return made if limit is None else limit_images(made, limit)
    base = name.removeprefix("joint-")
    prefix, _, rest = base.partition(":")
    if prefix == "folders" and shape is not None:
        given = {"size": shape[1:], "channels": shape[0], **given}
    if prefix in ("folders", "arrays") and not rest:
        raise ValueError(f"stream {name!r} needs a path after the colon: {'folders:my/tasks' if prefix == 'folders' else 'arrays:my.npz'}")
    if prefix in OTHER_STREAMS and (rest or prefix == "objects"):
        made = OTHER_STREAMS[prefix](base, data_dir, given)
    else:
        kind, _, source = base.partition("-")
        if kind not in KINDS or source not in CATALOGUE:
            raise ValueError(_describe_unknown(name))
        _check_options(name, given, KINDS[kind], _normalised)
        scale = {option: given.pop(option) for option in ("mean", "std") if option in given}
        made = KINDS[kind](_normalised(load(source, data_dir=data_dir, download=download), **scale), **given)
    made = made if limit is None else limit_images(made, limit)
    return joint(made) if base != name else made


def _normalised(source: Source, *, mean: Sequence[float] | float | None = None, std: Sequence[float] | float | None = None) -> Source:
    """Return the source with this mean and standard deviation per channel, for pixels in [0, 1]; without them, with its own."""
    return source if mean is None and std is None else replace(source, mean=per_channel(mean, "mean"), std=per_channel(std, "std"))


def _folders_stream(name: str, data_dir: Place, options: Options) -> Stream:
    _check_options(name, options, from_folders, grouped)
    return from_folders(_path_of(name), **options)


def _arrays_stream(name: str, data_dir: Place, options: Options) -> Stream:
    kind = KINDS.get(options.get("kind", "split"), grouped)
    _check_options(name, options, from_arrays, grouped, kind)
    return from_npz(_path_of(name), **options)


def _objects_stream(name: str, data_dir: Place, options: Options) -> Stream:
    _check_options(name, options, objects_stream)
    return objects_stream(parse_names(name), data_dir, **options)


def _given_stream(name: str, data_dir: Place, options: Options) -> Stream:
    _check_options(name, options, given_stream)
    return given_stream(name, **options)


OTHER_STREAMS: dict[str, Callable[[str, Place, Options], Stream]] = {  # the text before the colon → (name, data folder, options) → stream
    "folders": _folders_stream,
    "arrays": _arrays_stream,
    "objects": _objects_stream,
    "given": _given_stream,
}


def _path_of(name: str) -> Path:
    return Path(name.partition(":")[2])


def _check_options(name: str, given: Options, *functions: Callable[..., Any]) -> None:
    """Raise ValueError for an option that none of the functions takes, and name the nearest one."""
    known = sorted(
        {
            parameter.name
            for function in functions
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
    )
    for option in given:
        if option not in known:
            offered = sorted({*known, "limit"} - {"seed", "tasks", "held_out"})  # those are arguments, and settings of a run
            raise ValueError(f"stream {name!r} has no option {option!r}{suggest(option, offered)} (it has {', '.join(offered)})")


def _describe_unknown(name: str) -> str:
    every = [s for base in (*stream_names(), "objects") for s in (base, f"joint-{base}")]
    place = name.rpartition(":")[2]
    own = "arrays" if place.endswith(".npz") else "folders" if Path(place).is_dir() else ""
    hint = f"; did you mean '{own}:{place}'?" if own else suggest(name, every)
    return (
        f"no stream is called {name!r}{hint} (known: {', '.join(stream_names())}; objects and objects:NAME,NAME; "
        f"each also with joint- before it; folders:PATH and arrays:PATH.npz for your own data)"
    )
