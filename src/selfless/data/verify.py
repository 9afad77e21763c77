"""What is here, and whether it is what was published."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from selfless.data.checksums import digest
from selfless.data.paths import DataError, roots
from selfless.data.sources import cifar, tiny_imagenet
from selfless.data.sources import mnist as idx
from selfless.data.sources.base import CATALOGUE, Entry, entry


@dataclass(frozen=True)
class Check:
    """The state of one data set: "ok", "reduced" (usable, and named so), "altered" (not used) or "absent"."""

    name: str
    status: str
    place: Path | None
    detail: str = ""

    @property
    def usable(self) -> bool:
        return self.status in ("ok", "reduced")


def located(item: Entry, places: Iterable[Path]) -> tuple[Path, ...]:
    """The folders that hold the data set in one of the layouts `load` reads. By name only: no content is read."""
    if item.name == "cifar-100":
        return tuple(root for root in places if cifar.find(root) is not None)
    if item.name == "tiny-imagenet":
        found = [(tiny_imagenet.find(root), root) for root in places]
        whole_first = sorted((tiny_imagenet.MINI in path.name, i) for i, (path, _) in enumerate(found) if path)
        return tuple(found[i][1] for _, i in whole_first)
    folders = [root / item.folder for root in places]
    return tuple(folder for folder in folders if all(idx.find(folder, file) for file in item.files))


def verify(name: str | None = None, *, data_dir: str | os.PathLike[str] | None = None) -> tuple[Check, ...]:
    """Reads every file of one data set, or of all, and compares it with what was published."""
    return tuple(check(item, roots(data_dir)) for item in ([entry(name)] if name else CATALOGUE.values()))


def check(item: Entry, places: Iterable[Path]) -> Check:
    """The best copy found: the first usable one, else the first."""
    first: Check | None = None
    for place in located(item, places):
        found = _check(item, place)
        if found.usable:
            return found
        first = first or found
    return first or Check(item.name, "absent", None, f"selfless data fetch {item.name}")


def _check(item: Entry, place: Path) -> Check:
    try:
        if item.name == "tiny-imagenet":
            return _verify_tiny(item, place)
        if item.name == "cifar-100":
            cifar.read(place, again=True)
        else:
            for file in item.files:
                idx.content(place, file)
    except DataError as error:
        return Check(item.name, "altered", place, str(error))
    return Check(item.name, "ok", place, "checksums as published")


def _verify_tiny(item: Entry, root: Path) -> Check:
    found = tiny_imagenet.find(root)
    assert found is not None  # located() has just found it
    if found.name == item.files[0].name and digest(found) == item.files[0].sha256:
        return Check(item.name, "ok", root, "checksum as published")
    index = tiny_imagenet.survey(found, read_all=True)
    if index.reduced:
        return Check(item.name, "reduced", root, f"{found.name} is {index.reduced}; every image readable")
    return Check(item.name, "ok", root, "every image there and readable")
