"""What the reader of a layout returns: the images with their classes and halves. And helpers to read annotations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from selfless.data.errors import Altered
from selfless.data.rng import split_by_class
from selfless.data.sources.objects.files import SetFiles

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels; right and bottom are exclusive
TEST_SHARE = 0.2  # of a set that has no official test images


@dataclass(frozen=True)
class Item:
    """One image: its name among the set's files, its class, and the box to crop (None: all of it) without the `trim` lowest rows."""

    name: str
    label: int
    box: Box | None = None
    trim: int = 0


@dataclass(frozen=True)
class Listing:
    """All images of a set.

    split         says in words which images are for training and which for testing
    annotations   the names of the files from which this was read
    pictures      (n, H, W, 3) the images themselves, training images first, for a set whose images are not files (SVHN)
    """

    classes: tuple[str, ...]
    train: tuple[Item, ...]
    test: tuple[Item, ...]
    split: str
    annotations: tuple[str, ...]
    pictures: npt.NDArray[np.uint8] | None = None

    @property
    def items(self) -> tuple[Item, ...]:
        """All images, training images first."""
        return self.train + self.test

    def labels(self) -> npt.NDArray[np.int64]:
        """Return the class of every image, training images first."""
        return np.array([item.label for item in self.items], dtype=np.int64)


def parse_number(text: str, where: str, low: int, high: int) -> int:
    """Return a whole number from `low` to `high`. Raise Altered for anything else."""
    try:
        value = int(float(text)) if "." in text else int(text)
    except ValueError:
        raise Altered(f"{where}: {text!r} is not a number; fetch it again") from None
    if not low <= value <= high:
        raise Altered(f"{where}: {value} is out of range, which is {low} to {high}; fetch it again")
    return value


def read_table(files: SetFiles, name: str, columns: int) -> list[list[str]]:
    """Return the rows of a text file, split at blanks. Only the last column may contain blanks."""
    found = []
    for at, line in enumerate(files.read_text(name).splitlines(), 1):
        if line.strip():
            cells = line.split(None, columns - 1)
            if len(cells) != columns:
                raise Altered(f"{files.folder}: {name}, line {at}: {len(cells)} columns instead of {columns}; fetch it again")
            found.append([cell.strip() for cell in cells])
    if not found:
        raise Altered(f"{files.folder}: {name} is empty; fetch it again")
    return found


def parse_vector(values: Any, where: str) -> list[int]:
    """Return the numbers of a MATLAB vector."""
    array = np.asarray(values)
    if array.ndim != 2 or 1 not in array.shape or array.dtype.kind not in "iuf":
        raise Altered(f"{where} should be a vector of numbers and is {array.dtype} {array.shape}; fetch it again")
    return [int(v) for v in array.ravel()]


def split_items(items: Sequence[Item], what: str) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Return (train, test) with a fifth of every class for testing, where no split is published. It does not depend on a run's seed."""
    kept, taken = split_by_class(np.array([item.label for item in items], dtype=np.int64), TEST_SHARE, 0, f"test {what}")
    return tuple(items[i] for i in kept), tuple(items[i] for i in taken)
