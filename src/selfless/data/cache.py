"""Data sets in memory: each is loaded once and shared while it is in use.

A loaded data set is released with its last user. Inside `with holding():` it stays loaded, so that runs one after another share one
copy of their images, also on a GPU.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from selfless.data.errors import Altered, DataError, MissingData
from selfless.data.fetch import explain_missing, fetch
from selfless.data.paths import Place, data_dirs
from selfless.data.sources import Entry, Source, find_entry

T = TypeVar("T")
_HELD: list[dict[int, object]] = []
_LOADED: weakref.WeakValueDictionary[tuple[str, tuple[Path, ...]], Source] = weakref.WeakValueDictionary()


@contextmanager
def holding() -> Iterator[None]:
    """Keep data sets loaded inside `with holding():`. If blocks are nested, the outermost one decides when they are released."""
    _HELD.append({})
    try:
        yield
    finally:
        _HELD.pop()


def hold(loaded: T) -> T:
    """Keep an object until the outermost `holding` block ends; return it. Outside such a block, only return it."""
    if _HELD:
        _HELD[0][id(loaded)] = loaded
    return loaded


def load(name: str, *, data_dir: Place = None, download: bool = True) -> Source:
    """Load a published data set by name (see `sources`), checked. If it is not found and `download` is set, fetch it first.

    While a Source is in use, loading it again gives the same object: five seeds share one copy of the images.
    """
    item, roots = find_entry(name), data_dirs(data_dir)
    key = (name, roots)
    if (known := _LOADED.get(key)) is not None:
        return hold(known)
    found = item.find(roots)
    if not found:
        if not download:
            raise MissingData(explain_missing(item, ["not looked for on the network"], data_dir))
        fetch(name, data_dir=data_dir)
        found = item.find(roots)
    source = _read_first(item, found)
    _LOADED[key] = source
    return hold(source)


def offer(source: Source, *, data_dir: str | os.PathLike[str]) -> None:
    """Make `load(source.name, data_dir=data_dir)` return `source` while it is in use: data made in memory, without files."""
    _LOADED[source.name, data_dirs(data_dir)] = source


def _read_first(item: Entry, places: tuple[Path, ...]) -> Source:
    """Read the first copy that is not altered. If all are altered, raise the first error."""
    first: DataError | None = None
    for place in places:
        try:
            return item.read(place)
        except Altered as error:
            first = first or error
    assert first is not None
    raise first
