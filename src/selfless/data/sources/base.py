"""What every data source shares: its files (File), what is known of it (Entry), a copy's state (Check), its images in memory (Source)."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Source:
    """A data set in memory: images (n, C, H, W) and labels (n,) int64 in 0 … len(classes)−1, for training and testing.

    Images are uint8, or float32 that is used unchanged. `mean` and `std` are per channel, for pixels in [0, 1]; None: pixels are only
    divided by 255. `reduced` says in words how the set falls short of the published one; it is shown wherever results are.
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: tuple[str, ...]
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    reduced: str | None = None
    classes_per_task: int | None = None

    def __post_init__(self) -> None:
        for kind, (x, y) in (("train", self.train), ("test", self.test)):
            if x.ndim != 4 or x.dtype not in (torch.uint8, torch.float32) or x.shape[1:] != self.train[0].shape[1:]:
                raise ValueError(f"{self.name} {kind}: images must be (n, C, H, W) uint8 or float32, not {_describe(x)}")
            if y.dtype != torch.int64 or y.shape != (len(x),):
                raise ValueError(f"{self.name} {kind}: {len(x)} images need as many int64 labels, not {_describe(y)}")
            if len(y) and not (int(y.min()) >= 0 and int(y.max()) < len(self.classes)):
                raise ValueError(f"{self.name} {kind}: labels must lie in 0 … {len(self.classes) - 1}")
        if self.mean is not None or self.std is not None:
            self._check_scale(self.mean or (), self.std or ())

    def _check_scale(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        channels = self.shape[0]
        if len(mean) != channels or len(std) != channels or not all(map(math.isfinite, (*mean, *std))) or min(std) <= 0:
            each = "one number" if channels == 1 else f"{channels} numbers"
            raise ValueError(f"{self.name}: mean {mean} and std {std} must be {each} each (one per channel), std above 0; or give neither")

    @property
    def shape(self) -> tuple[int, int, int]:
        """The (C, H, W) of an image."""
        _, c, h, w = self.train[0].shape
        return c, h, w

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks that every result over this data set repeats."""
        return (f"{self.name} is {self.reduced}",) if self.reduced else ()


def _describe(x: Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class File:
    """One published file.

    `content_sha256` is the checksum of the decompressed content, if it is known. Where no SHA-256 is published, `sha256` is empty and
    `md5` is checked; where no checksum is published at all, only the content of the file can show that it is right.
    """

    name: str
    size: int
    sha256: str
    urls: tuple[str, ...]
    content_sha256: str | None = None
    md5: str | None = None

    @property
    def checksum(self) -> tuple[str, str] | None:
        """The (algorithm, hex digest) of the published file, if one is published."""
        return ("sha256", self.sha256) if self.sha256 else ("md5", self.md5) if self.md5 else None


@dataclass(frozen=True)
class Wheel:
    """A Python package that contains the files unchanged, for machines that reach a package index only."""

    requirement: str


@dataclass(frozen=True)
class Check:
    """The state of one data set: "ok", "reduced" (used, and named so), "altered" (not used) or "absent"."""

    name: str
    status: str
    place: Path | None
    detail: str = ""

    @property
    def usable(self) -> bool:
        return self.status in ("ok", "reduced")


@dataclass(frozen=True)
class Entry:
    """A published data set: its files and numbers, and how to find, read and check a copy. One subclass per file format.

    `folder` is the sub-folder of the data folder in which the files lie; "" for the data folder itself.
    """

    name: str
    title: str
    folder: str
    files: tuple[File, ...]
    train: int
    test: int
    classes: int
    shape: tuple[int, int, int]
    classes_per_task: int
    wheels: tuple[Wheel, ...] = ()

    @property
    def size(self) -> int:
        """The bytes to download."""
        return sum(file.size for file in self.files)

    def is_in(self, folder: Path) -> bool:
        """Return whether `folder` holds a copy, judged by file names only."""
        raise NotImplementedError

    def find(self, roots: Iterable[Path]) -> tuple[Path, ...]:
        """Return the folders with a copy, below the data folders `roots`, the best copy first. No content is read."""
        return tuple(place for root in roots if self.is_in(place := root / self.folder))

    def read(self, place: Path) -> Source:
        """Read the copy in a folder that `find` returned. Raise Altered if it is not the published data."""
        raise NotImplementedError

    def check(self, place: Path) -> Check:
        """Read every file of the copy in `place` and compare it with what was published. Raise DataError if it differs."""
        raise NotImplementedError


def to_tensors(half: tuple[Images, Labels]) -> tuple[Tensor, Tensor]:
    """Wrap images and labels as tensors, without a copy."""
    return torch.from_numpy(half[0]), torch.from_numpy(half[1])


def per_channel(values: Sequence[float] | float | None, what: str) -> tuple[float, ...] | None:
    """Return a mean or a standard deviation as a tuple, one number per channel. One number alone is that of one channel."""
    if values is None:
        return None
    try:
        listed: Sequence[float] = [values] if isinstance(values, int | float) or np.ndim(values) == 0 else values  # type: ignore[list-item]
        if not any(isinstance(value, str | bool) for value in listed):
            return tuple(float(value) for value in listed)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{what} is {values!r}; it must be one number per channel, as 0.5 or [0.5, 0.5, 0.5]")


def suggest(given: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or "" if no known name is close."""
    close = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
