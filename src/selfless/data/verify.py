"""Compare the copies of published data sets on this machine with what was published."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from selfless.data.errors import DataError
from selfless.data.paths import Place, data_dirs
from selfless.data.sources import CATALOGUE, Check, Entry, find_entry


def verify(name: str | None = None, *, data_dir: Place = None) -> tuple[Check, ...]:
    """Read every file of one data set, or of all, and compare it with what was published."""
    return tuple(check_copies(item, data_dirs(data_dir)) for item in ([find_entry(name)] if name else CATALOGUE.values()))


def check_copies(item: Entry, roots: Iterable[Path]) -> Check:
    """Return the state of the first usable copy below `roots`, else of the first copy, else "absent"."""
    first: Check | None = None
    for place in item.find(roots):
        try:
            return item.check(place)
        except DataError as error:
            first = first or Check(item.name, "altered", place, str(error))
    return first or Check(item.name, "absent", None, f"selfless data fetch {item.name}")
