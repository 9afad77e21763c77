"""Parts of a data set, and their resident form: bytes on the device once, batches as index slices.

A Part is a view: all tasks of a stream share one tensor of images. Its permutation or rotation is applied once, when
it becomes resident, in integer arithmetic on the CPU, so that every machine and device holds the same bytes.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from selfless.data.augment import Augment
from selfless.data.paths import DataError, cache_dir
from selfless.data.rotation import table, turned

ROWS_AT_ONCE = 4096
Device = torch.device | str


@dataclass(frozen=True, eq=False)
class Part:
    """The images `rows` of a data set, seen through a permutation of pixels or a rotation.

    images (n, C, H, W) uint8; labels (n,) int64, the *output column* of each image (−1: a class that is not used);
    rows (m,) int64; pixels (C·H·W,) int64 or None; weights (m,) or None: how likely each row is to be drawn.
    """

    images: Tensor
    labels: Tensor
    rows: Tensor
    pixels: Tensor | None = None
    angle: float = 0.0
    weights: Tensor | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self,)

    @property
    def targets(self) -> Tensor:
        """(m,) int64: the output column of each row."""
        return self.labels.index_select(0, self.rows)

    @property
    def whole(self) -> bool:
        """Whether this is every image, in order and as it is: then nothing needs copying."""
        n = len(self.images)
        return self.plain and len(self) == n and bool(torch.equal(self.rows, torch.arange(n)))

    @property
    def plain(self) -> bool:
        return self.pixels is None and self.angle % 360 == 0

    def order(self, generator: torch.Generator) -> Tensor:
        """(m,) int64: the order of one epoch; a shuffle, or with `weights` as many draws with replacement."""
        return _order(len(self), self.weights, generator)

    def chunks(self) -> Iterator[Tensor]:
        """The images, a few thousand at a time, permuted and rotated."""
        turn = None if self.angle % 360 == 0 else table(self.images.shape[2], self.images.shape[3], self.angle)
        for rows in self.rows.split(ROWS_AT_ONCE):
            x = self.images.index_select(0, rows)
            if self.pixels is not None:  # numpy's take is 2½ times as fast as index_select along dimension 1
                flat = x.reshape(len(x), -1).numpy().take(self.pixels.numpy(), axis=1)
                x = torch.from_numpy(flat).reshape(x.shape)
            yield x if turn is None else turned(x, *turn)

    def resident(self, device: Device = "cpu", budget: int | None = None) -> Resident:
        """On the device; or, if that takes more than `budget` bytes, memory-mapped on disk, with the same batches."""
        return settle(self, device, budget)


@dataclass(frozen=True, eq=False)
class Joined:
    """Several parts as one, each with its own permutation and head: what joint training trains on."""

    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def targets(self) -> Tensor:
        return torch.cat([part.targets for part in self.parts])

    @property
    def weights(self) -> Tensor | None:
        return None

    @property
    def mean(self) -> tuple[float, ...] | None:
        return self.parts[0].mean

    @property
    def std(self) -> tuple[float, ...] | None:
        return self.parts[0].std

    def order(self, generator: torch.Generator) -> Tensor:
        return _order(len(self), None, generator)

    def resident(self, device: Device = "cpu", budget: int | None = None) -> Resident:
        return settle(self, device, budget)


class Resident:
    """Images ready to be sliced: x (m, C, H, W) uint8, y (m,) int64 output columns, and how to normalise.

    `x` lies on `device`, unless `mapped`: then it is on the CPU and backed by a file (or is the data set's own tensor,
    with `rows` saying which), and each batch is moved. Do not write to it: it may be shared with other tasks.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        *,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        rows: Tensor | None = None,
        mapped: bool = False,
    ) -> None:
        self.x, self.y, self.rows, self.mapped = x, y, rows, mapped
        self.device = y.device
        scale = 255.0 if x.dtype == torch.uint8 else 1.0
        self._scale: Tensor | float | None = 1 / scale if scale != 1.0 else None
        self._shift: Tensor | None = None
        self._affine: tuple[Tensor, Tensor | None] | None = None
        if mean is not None and std is not None:  # (x/255 − mean)/std = x · 1/(255 std) − mean/std
            sd = torch.tensor(std, dtype=torch.float64)
            self._scale = (1 / (scale * sd)).float().view(-1, 1, 1).to(self.device)
            self._shift = (torch.tensor(mean, dtype=torch.float64) / sd).float().view(-1, 1, 1).to(self.device)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, int, int]:
        _, c, h, w = self.x.shape
        return c, h, w

    def normalise(self, x: Tensor) -> Tensor:
        """float32 of bytes (or of floats), scaled and shifted in place on the copy."""
        if x.is_cuda and x.dtype == torch.uint8 and isinstance(self._scale, float):
            return x * self._scale  # one kernel instead of two
        out = x.to(torch.float32, copy=True)
        if self._scale is not None:
            out.mul_(self._scale)
        return out if self._shift is None else out.sub_(self._shift)

    def affine(self) -> tuple[Tensor, Tensor | None]:
        """(scale, shift) of `normalise`, on the device: one number each a channel, or one scale and no shift."""
        if self._affine is None:
            scale = 1.0 if self._scale is None else self._scale
            flat = scale.flatten() if isinstance(scale, Tensor) else torch.tensor([scale], device=self.device)
            self._affine = flat, None if self._shift is None else self._shift.flatten()
        return self._affine

    def raw(self, index: Tensor) -> Tensor:
        """(k, C, H, W) uint8 on the device, for a flat index."""
        if not self.mapped:
            return self.x.index_select(0, index)
        index = index.cpu()
        return self.x.index_select(0, index if self.rows is None else self.rows[index]).to(self.device)

    def batch(self, index: Tensor, *, augment: Augment | None = None, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Normalised float32 images and their columns. An index of shape (…) gives (…, C, H, W) and (…)."""
        index = index.to(self.device)
        flat = index.reshape(-1)
        x = self.raw(flat)
        if augment is not None:
            x = augment(x, generator)
        out, y = self.normalise(x), self.y.index_select(0, flat)
        return (out, y) if index.ndim == 1 else (out.view(*index.shape, *out.shape[1:]), y.view(index.shape))


def settle(part: Part | Joined, device: Device = "cpu", budget: int | None = None) -> Resident:
    """Makes a part resident; see `Part.resident`."""
    first = part.parts[0]
    shape = (len(part), *first.images.shape[1:])
    y = part.targets.to(device)
    size = math.prod(shape) * first.images.element_size()
    alone = len(part.parts) == 1
    if budget is not None and size > budget:
        if alone and first.plain:  # the data set's own tensor will do: it is in memory, or on disk, already
            return Resident(first.images, y, mean=first.mean, std=first.std, rows=first.rows, mapped=True)
        return Resident(_on_disk(part, shape), y, mean=first.mean, std=first.std, mapped=True)
    if alone and first.whole:
        x = first.images.to(device)
    else:
        x = torch.empty(shape, dtype=first.images.dtype, device=device)
        _fill(x, part)
    return Resident(x, y, mean=first.mean, std=first.std)


def _fill(x: Tensor, part: Part | Joined) -> None:
    at = 0
    for one in part.parts:
        for chunk in one.chunks():
            x[at : at + len(chunk)].copy_(chunk)
            at += len(chunk)


def _on_disk(part: Part | Joined, shape: tuple[int, ...]) -> Tensor:
    """A scratch file, mapped and then unlinked: it is gone with the process, however that ends."""
    folder = cache_dir() / "scratch"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=folder, suffix=".bytes")
        os.close(handle)
    except OSError as error:
        raise DataError(f"cannot write to {folder} ({error}); set XDG_CACHE_HOME to a folder you own") from error
    dtype = np.uint8 if part.parts[0].images.dtype == torch.uint8 else np.float32
    x = torch.from_numpy(np.memmap(path, dtype=dtype, mode="w+", shape=shape))
    with contextlib.suppress(OSError):  # Windows keeps a mapped file; there it stays in the cache
        os.unlink(path)
    _fill(x, part)
    return x


def _order(n: int, weights: Tensor | None, generator: torch.Generator) -> Tensor:
    if weights is None:
        return torch.randperm(n, generator=generator, device=generator.device)
    return torch.multinomial(weights.to(generator.device), n, replacement=True, generator=generator)
