"""The data of a stream that its name does not determine, so that a recorded result can show that its data has changed.

Published data is checked by its own checksums and needs nothing here. Custom arrays and folders are named by a path only, and object sets
may be complete, partial or copies: the same name may mean other images tomorrow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Place = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Contents:
    """The part of a stream that its name does not determine.

    listing   text that changes when the data does; None if there is nothing to list
    files     files whose bytes belong to the stream
    is_here   False: the data is not on this machine, so nothing can be compared
    is_slow   True: reading this is slow, so the caller should cache it
    """

    listing: bytes | None = None
    files: tuple[Path, ...] = ()
    is_here: bool = True
    is_slow: bool = False


def stream_contents(name: str, *, tasks: int | None = None, options: Mapping[str, Any] | None = None, data_dir: Place = None) -> Contents:
    """Return the contents of the stream of that name; empty for published data."""
    base = name.removeprefix("joint-")
    kind, _, path = base.partition(":")
    look = LOOKS.get(kind)
    return Contents() if look is None else look(base, path, tasks, options or {}, data_dir)


def _arrays(_: str, path: str, *__: Any) -> Contents:
    return Contents(files=(Path(path),))


def _folders(_: str, path: str, *__: Any) -> Contents:
    """List the sizes and times of files, because reading every image would take as long as an epoch."""
    files = [item for item in sorted(Path(path).rglob("*")) if item.is_file()]
    lines = [f"{item.relative_to(path)} {item.stat().st_size} {item.stat().st_mtime_ns}\n" for item in files]
    return Contents("".join(lines).encode())


def _objects(base: str, _: str, tasks: int | None, options: Mapping[str, Any], data_dir: Place) -> Contents:
    from selfless.data.object_stream import objects_digest

    chosen = {name: value for name, value in options.items() if name in ("boxes", "aircraft")}
    found = objects_digest(base, data_dir, tasks=tasks, **chosen)
    return Contents(found.encode() or None, is_here=bool(found), is_slow=True)


LOOKS: dict[str, Callable[[str, str, int | None, Mapping[str, Any], Place], Contents]] = {
    "arrays": _arrays,
    "folders": _folders,
    "objects": _objects,
}
