"""Tiny ImageNet in its original layout, zipped or not, whole or reduced. Its validation images are the test set."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from selfless.data.archives import Tree
from selfless.data.checksums import Altered
from selfless.data.images import Bytes, decode, decoded
from selfless.data.paths import DataError, MissingData

TOP = "tiny-imagenet-200"
MINI = f"{TOP}-mini"
PLACES = (TOP, f"{TOP}.zip", MINI, f"{MINI}.zip")
SHAPE = (3, 64, 64)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
TRAIN, TEST = 500, 50  # published images a class


@dataclass(frozen=True)
class Index:
    """Which files are images, and of which class."""

    train: tuple[tuple[str, ...], tuple[int, ...]]
    test: tuple[tuple[str, ...], tuple[int, ...]]
    classes: tuple[str, ...]
    reduced: str | None


def find(root: Path) -> Path | None:
    """The unpacked folder or the zip, below `root`; the whole set before a reduced one."""
    found = (root / name for name in PLACES)
    return next((path for path in found if path.is_file() or (path / "wnids.txt").is_file()), None)


def tree(place: Path) -> Tree:
    return Tree(place, TOP)


def index(files: Tree) -> Index:
    """Reads wnids.txt, words.txt and val_annotations.txt, and lists the images that are there."""
    wnids = files.read("wnids.txt").decode().split()
    number = {wnid: i for i, wnid in enumerate(wnids)}
    words = dict(line.split("\t", 1) for line in files.read("words.txt").decode().splitlines() if "\t" in line)
    names = files.names()
    train = [(name, name.split("/")[1]) for name in names if name.startswith("train/") and _is_image(name)]
    noted = dict(line.split("\t")[:2] for line in files.read("val/val_annotations.txt").decode().splitlines() if line)
    test = [(name, noted.get(name.rsplit("/", 1)[1], "")) for name in names if name.startswith("val/") and _is_image(name)]
    for name, wnid in (*train, *test):
        if wnid not in number:
            raise Altered(f"{files.place}: {name} is of class {wnid or 'unknown'!r}, which wnids.txt does not name")
    if not train or not test:
        raise Altered(f"{files.place} holds {len(train)} training and {len(test)} validation images; fetch it again")
    splits = [(tuple(n for n, _ in part), tuple(number[w] for _, w in part)) for part in (train, test)]
    classes = tuple(words.get(wnid, wnid).split(",")[0].strip() for wnid in wnids)
    return Index(splits[0], splits[1], classes, reduction(splits[0][1], splits[1][1], len(wnids)))


def _is_image(name: str) -> bool:
    return name.lower().endswith((".jpeg", ".jpg", ".png")) and "/images/" in name


def reduction(train: tuple[int, ...], test: tuple[int, ...], classes: int) -> str | None:
    """How the set falls short of the published one, in words, or None if it does not."""
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


def read(root: Path) -> tuple[tuple[tuple[Bytes, npt.NDArray[np.int64]], ...], Index]:
    """((train, test), index): images (n, 3, 64, 64) uint8, memory-mapped from the cache."""
    place = find(root)
    if place is None:
        raise MissingData(f"no {TOP}.zip in {root}; fetch it with: selfless data fetch tiny-imagenet")
    with tree(place) as files:
        found = index(files)
        names = [*found.train[0], *found.test[0]]
        images = decoded(files.mark, names, files.read, SHAPE, "Tiny ImageNet")
    cut = len(found.train[0])
    labels = [np.array(part[1], dtype=np.int64) for part in (found.train, found.test)]
    return ((images[:cut], labels[0]), (images[cut:], labels[1])), found


def survey(place: Path, *, read_all: bool = False) -> Index:
    """The index alone, or (`read_all`) with every image decoded to see that it can be."""
    with tree(place) as files:
        found = index(files)
        for name in (*found.train[0], *found.test[0]) if read_all else ():
            try:
                decode(files.read(name), SHAPE, name)
            except DataError as error:
                raise Altered(f"{place}: {error}") from error
    return found
