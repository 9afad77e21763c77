"""Tiny ImageNet in its original layout, as a zip or unpacked, whole or reduced. Its validation images are the test set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from selfless.data.archives import Tree
from selfless.data.checksums import file_digest
from selfless.data.errors import Altered, DataError, MissingData
from selfless.data.images import decode_image, decode_images
from selfless.data.sources.base import Check, Entry, File, Images, Labels, Source, to_tensors

TOP = "tiny-imagenet-200"
MINI = f"{TOP}-mini"
PLACES = (TOP, f"{TOP}.zip", MINI, f"{MINI}.zip")  # the whole set before a reduced one
SHAPE = (3, 64, 64)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
TRAIN, TEST = 500, 50  # published images per class


@dataclass(frozen=True)
class TinyImageNet(Entry):
    """Tiny ImageNet; a reduced copy is used too, and results say so."""

    def is_in(self, folder: Path) -> bool:
        return find_files(folder) is not None

    def find(self, roots: Iterable[Path]) -> tuple[Path, ...]:
        found = [(path, root) for root in roots if (path := find_files(root)) is not None]
        return tuple(root for _, root in sorted(found, key=lambda one: MINI in one[0].name))  # stable: whole copies first

    def read(self, place: Path) -> Source:
        (train, test), index = read_images(place)
        return Source(self.name, to_tensors(train), to_tensors(test), index.classes, MEAN, STD, index.reduced, self.classes_per_task)

    def check(self, place: Path) -> Check:
        found = find_files(place)
        if found is None:
            raise MissingData(f"no {TOP}.zip in {place}; fetch it with: selfless data fetch tiny-imagenet")
        if found.name == self.files[0].name and file_digest(found) == self.files[0].sha256:
            return Check(self.name, "ok", place, "checksum as published")
        index = check_images(found)
        if index.reduced:
            return Check(self.name, "reduced", place, f"{found.name} is {index.reduced}; every image readable")
        return Check(self.name, "ok", place, "every image there and readable")


@dataclass(frozen=True)
class Index:
    """The names and classes of the images. `reduced` says in words what is missing, or is None."""

    train: tuple[tuple[str, ...], tuple[int, ...]]
    test: tuple[tuple[str, ...], tuple[int, ...]]
    classes: tuple[str, ...]
    reduced: str | None


def find_files(root: Path) -> Path | None:
    """Return the unpacked folder or the zip in `root`; the whole set before a reduced one."""
    found = (root / name for name in PLACES)
    return next((path for path in found if path.is_file() or (path / "wnids.txt").is_file()), None)


def read_index(files: Tree) -> Index:
    """Read wnids.txt, words.txt and val_annotations.txt, and list the images."""
    wnids = files.read("wnids.txt").decode().split()
    number = {wnid: i for i, wnid in enumerate(wnids)}
    words = dict(line.split("\t", 1) for line in files.read("words.txt").decode().splitlines() if "\t" in line)
    names = files.names()
    train = [(name, name.split("/")[1]) for name in names if name.startswith("train/") and _is_image(name)]
    noted = dict(line.split("\t")[:2] for line in files.read("val/val_annotations.txt").decode().splitlines() if line)
    test = [(name, noted.get(name.rsplit("/", 1)[1], "")) for name in names if name.startswith("val/") and _is_image(name)]
    for name, wnid in (*train, *test):
        if wnid not in number:
            raise Altered(f"{files.place}: {name} is of class {wnid or 'unknown'!r}, which wnids.txt does not name; fetch it again")
    if not train or not test:
        raise Altered(f"{files.place} holds {len(train)} training and {len(test)} validation images; fetch it again")
    halves = [(tuple(n for n, _ in part), tuple(number[w] for _, w in part)) for part in (train, test)]
    classes = tuple(words.get(wnid, wnid).split(",")[0].strip() for wnid in wnids)
    return Index(halves[0], halves[1], classes, describe_reduction(halves[0][1], halves[1][1], len(wnids)))


def _is_image(name: str) -> bool:
    return name.lower().endswith((".jpeg", ".jpg", ".png")) and "/images/" in name


def describe_reduction(train: tuple[int, ...], test: tuple[int, ...], classes: int) -> str | None:
    """Say in words how the set falls short of the published one; None if it does not."""
    parts = []
    for labels, full, kind in ((train, TRAIN, "training"), (test, TEST, "test")):
        counts = Counter(labels)
        low, high = min(counts[c] for c in range(classes)), max(counts.values())
        if (low, high) != (full, full):
            some = str(low) if low == high else f"{low} to {high}"
            parts.append(f"{some} of {full} {kind}")
    if classes != 200:
        parts.append(f"{classes} of 200 classes")
    return f"reduced: {' and '.join(parts)}{' images a class' if classes == 200 else ''}" if parts else None


def read_images(root: Path) -> tuple[tuple[tuple[Images, Labels], tuple[Images, Labels]], Index]:
    """Return ((train, test), index). Images are (n, 3, 64, 64) uint8, memory-mapped from the cache."""
    place = find_files(root)
    if place is None:
        raise MissingData(f"no {TOP}.zip in {root}; fetch it with: selfless data fetch tiny-imagenet")
    with Tree(place, TOP) as files:
        index = read_index(files)
        names = [*index.train[0], *index.test[0]]
        images = decode_images(files.mark, names, files.read, SHAPE, "Tiny ImageNet")
    cut = len(index.train[0])
    train, test = (np.array(half[1], dtype=np.int64) for half in (index.train, index.test))
    return ((images[:cut], train), (images[cut:], test)), index


def check_images(place: Path) -> Index:
    """Decode every image and return the index. Raise Altered if an image cannot be decoded."""
    with Tree(place, TOP) as files:
        index = read_index(files)
        for name in (*index.train[0], *index.test[0]):
            try:
                decode_image(files.read(name), SHAPE, name)
            except DataError as error:
                raise Altered(f"{place}: {error}") from error
    return index


TINY_IMAGENET = TinyImageNet(
    "tiny-imagenet",
    "photographs",
    "",
    (
        File(
            "tiny-imagenet-200.zip",
            248100043,
            "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
            ("https://cs231n.stanford.edu/tiny-imagenet-200.zip",),
        ),
    ),
    train=100000,
    test=10000,
    classes=200,
    shape=(3, 64, 64),
    classes_per_task=20,
)
