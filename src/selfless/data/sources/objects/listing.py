"""What a reader of a published layout gives: which images there are, of which class, in which half, and what part of each to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from selfless.data.checksums import Altered
from selfless.data.rng import stratified
from selfless.data.sources.objects.files import Shelf

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels; right and bottom are beyond the last one
TEST_SHARE = 0.2  # of a set that has no official test images


@dataclass(frozen=True)
class Item:
    """One image: its name on the shelf, its class, and the box to take out of it (None: all), less `trim` rows at the bottom."""

    name: str
    label: int
    box: Box | None = None
    trim: int = 0


@dataclass(frozen=True)
class Listing:
    """`split` says in words which images are for training and which for testing; `annotations` are the names of the files that this
    was read from. Pictures that are no files (SVHN) come as `pictures`, (n, H, W, 3), those for training first."""

    classes: tuple[str, ...]
    train: tuple[Item, ...]
    test: tuple[Item, ...]
    split: str
    annotations: tuple[str, ...]
    pictures: npt.NDArray[np.uint8] | None = None

    @property
    def items(self) -> tuple[Item, ...]:
        return self.train + self.test

    def labels(self) -> npt.NDArray[np.int64]:
        return np.array([item.label for item in self.items], dtype=np.int64)


def number(text: str, where: str, low: int, high: int) -> int:
    """A whole number from `low` to `high` out of an annotation."""
    try:
        value = int(float(text)) if "." in text else int(text)
    except ValueError:
        raise Altered(f"{where}: {text!r} is not a number; fetch it again") from None
    if not low <= value <= high:
        raise Altered(f"{where}: {value} is out of range, which is {low} to {high}; fetch it again")
    return value


def rows(shelf: Shelf, name: str, columns: int) -> list[list[str]]:
    """The lines of a table of text, split at blanks; the last column may itself hold blanks."""
    found = []
    for at, line in enumerate(shelf.text(name).splitlines(), 1):
        if line.strip():
            cells = line.split(None, columns - 1)
            if len(cells) != columns:
                raise Altered(f"{shelf.folder}: {name}, line {at}: {len(cells)} columns instead of {columns}; fetch it again")
            found.append([cell.strip() for cell in cells])
    if not found:
        raise Altered(f"{shelf.folder}: {name} is empty; fetch it again")
    return found


def column(values: Any, where: str) -> list[int]:
    """The numbers of a MATLAB vector."""
    array = np.asarray(values)
    if array.ndim != 2 or 1 not in array.shape or array.dtype.kind not in "iuf":
        raise Altered(f"{where} should be a vector of numbers and is {array.dtype} {array.shape}; fetch it again")
    return [int(v) for v in array.ravel()]


def halves(items: Sequence[Item], what: str) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """A fifth of every class for testing, where nobody published a split. The choice is always the same: it is no part of a run's seed."""
    kept, taken = stratified(np.array([item.label for item in items], dtype=np.int64), TEST_SHARE, 0, f"test {what}")
    return tuple(items[i] for i in kept), tuple(items[i] for i in taken)
