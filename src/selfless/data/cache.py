"""A data set in memory: images as bytes, labels, names."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from selfless.data.checksums import Altered
from selfless.data.fetch import fetch, help_yourself
from selfless.data.holding import hold
from selfless.data.paths import DataError, MissingData, roots
from selfless.data.sources import cifar, tiny_imagenet
from selfless.data.sources import mnist as idx
from selfless.data.sources.base import Entry, entry
from selfless.data.verify import located

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Source:
    """Images (n, C, H, W), uint8 (or float32, then used as they are), labels (n,) int64 in 0 … len(classes)−1.

    `mean` and `std` are per channel, of pixels in [0, 1]; None means that pixels are divided by 255 and no more.
    `reduced` says in words how the set falls short of the published one; it is shown wherever results are.
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
                raise ValueError(f"{self.name} {kind}: images must be (n, C, H, W) uint8 or float32, not {_kind(x)}")
            if y.dtype != torch.int64 or y.shape != (len(x),):
                raise ValueError(f"{self.name} {kind}: {len(x)} images need as many int64 labels, not {_kind(y)}")
            if len(y) and not (int(y.min()) >= 0 and int(y.max()) < len(self.classes)):
                raise ValueError(f"{self.name} {kind}: labels must lie in 0 … {len(self.classes) - 1}")

    @property
    def shape(self) -> tuple[int, int, int]:
        _, c, h, w = self.train[0].shape
        return c, h, w

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"{self.name} is {self.reduced}",) if self.reduced else ()


def _kind(x: Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _tensors(split: tuple[Images, Labels]) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(split[0]), torch.from_numpy(split[1])


_LOADED: weakref.WeakValueDictionary[tuple[str, tuple[Path, ...]], Source] = weakref.WeakValueDictionary()


def load(name: str, *, data_dir: str | os.PathLike[str] | None = None, download: bool = True) -> Source:
    """A published data set by name (see `sources`), checked; fetched first if it is nowhere and `download` is set.

    While somebody holds the Source, loading it again gives the same one: five seeds share one copy of the images.
    """
    item, places = entry(name), roots(data_dir)
    key = (name, places)
    if (known := _LOADED.get(key)) is not None:
        return hold(known)
    found = located(item, places)
    if not found:
        if not download:
            raise MissingData(help_yourself(item, ["not looked for on the network"], data_dir))
        fetch(name, data_dir=data_dir)
        found = located(item, places)
    source = _first_whole(item, found)
    _LOADED[key] = source
    return hold(source)


def offer(source: Source, *, data_dir: str | os.PathLike[str]) -> None:
    """While somebody holds `source`, `load(source.name, data_dir=data_dir)` gives it, whatever lies there: data made up in memory."""
    _LOADED[source.name, roots(data_dir)] = source


def _first_whole(item: Entry, places: tuple[Path, ...]) -> Source:
    """An altered copy is passed over if there is a whole one elsewhere; if not, its fault is what is reported."""
    fault: DataError | None = None
    for place in places:
        try:
            return _read(item, place)
        except Altered as error:
            fault = fault or error
    assert fault is not None
    raise fault


def _read(item: Entry, place: Path) -> Source:
    step = item.classes_per_task
    if item.name == "cifar-100":
        train, test, names = cifar.read(place)
        return Source(item.name, _tensors(train), _tensors(test), names, cifar.MEAN, cifar.STD, None, step)
    if item.name == "tiny-imagenet":
        splits, index = tiny_imagenet.read(place)
        train, test, (mean, std) = splits[0], splits[1], (tiny_imagenet.MEAN, tiny_imagenet.STD)
        return Source(item.name, _tensors(train), _tensors(test), index.classes, mean, std, index.reduced, step)
    splits = idx.read(place, item)
    names = idx.DIGITS if item.name == "mnist" else idx.ARTICLES
    return Source(item.name, _tensors(splits[0]), _tensors(splits[1]), names, classes_per_task=step)
