"""Streams by name: `permuted-mnist`, `joint-split-cifar-100`, `objects:flowers,birds`, `folders:PATH`, `arrays:PATH.npz`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selfless.data.cache import load
from selfless.data.custom import KINDS, from_arrays, from_npz, grouped
from selfless.data.object_stream import objects_stream, parse
from selfless.data.sources.base import CATALOGUE, suggestion
from selfless.data.sources.folders import from_folders
from selfless.data.streams import Stream, joint, limited


def stream_names() -> tuple[str, ...]:
    """Every `kind-source` there is; `joint-` may stand before each of them, and before `objects`."""
    return tuple(f"{kind}-{source}" for kind in KINDS for source in CATALOGUE)


def stream(
    name: str,
    *,
    tasks: int | None = None,
    seed: int = 0,
    held_out: float = 0.0,
    limit: int | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = True,
    **options: Any,
) -> Stream:
    """The stream of that name; `tasks` and the options a kind does not get keep its defaults.

    `held_out` is the share of the training images, class by class, set aside for choosing things; `limit` keeps so many
    images of each task's parts; `download=False` never touches the network. Same name, options and seed: same stream, on every machine.
    """
    base = name.removeprefix("joint-")
    more = {"seed": seed, "held_out": held_out, **({} if tasks is None else {"tasks": tasks}), **options}
    head, _, path = base.partition(":")
    if head in ("folders", "arrays") and path:
        made = _own(head, Path(path), more)
    elif head == "objects":
        _known_options(name, more, objects_stream)
        made = objects_stream(parse(base), data_dir, **more)
    else:
        kind, _, source = base.partition("-")
        if kind not in KINDS or source not in CATALOGUE:
            raise ValueError(_unknown(name))
        _known_options(name, more, KINDS[kind])
        made = KINDS[kind](load(source, data_dir=data_dir, download=download), **more)
    made = made if limit is None else limited(made, limit)
    return joint(made) if base != name else made


def _own(head: str, path: Path, options: dict[str, Any]) -> Stream:
    if head == "folders":
        _known_options(f"folders:{path}", options, from_folders, grouped)
        return from_folders(path, **options)
    kind = KINDS.get(options.get("kind", "split"), grouped)
    _known_options(f"arrays:{path}", options, from_arrays, grouped, kind)
    return from_npz(path, **options)


def _known_options(name: str, given: dict[str, Any], *functions: Callable[..., Any]) -> None:
    """An option nobody takes is an error that names the nearest one, not a TypeError."""
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
            raise ValueError(f"stream {name!r} has no option {option!r}{suggestion(option, known)} (it has {', '.join(known)})")


def _unknown(name: str) -> str:
    every = [s for base in (*stream_names(), "objects") for s in (base, f"joint-{base}")]
    return (
        f"no stream is called {name!r}{suggestion(name, every)} (known: {', '.join(stream_names())}; objects and objects:NAME,NAME; "
        f"each also with joint- before it; folders:PATH and arrays:PATH.npz for your own data)"
    )
