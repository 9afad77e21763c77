"""Parts of a data set, and their resident form: all images on the device, batches taken by index.

A Part is a view: all tasks of a stream share one tensor of images. A permutation or rotation is applied once, when the part becomes
resident, in integer arithmetic on the CPU. So every machine and device holds the same bytes.
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
from selfless.data.paths import cache_dir, make_folder
from selfless.data.rotation import rotate, rotation_table

CHUNK = 4096  # images permuted or rotated at a time
Device = torch.device | str


@dataclass(frozen=True, eq=False)
class Part:
    """The images `rows` of a data set, with their pixels permuted or rotated.

    images    (n, C, H, W), uint8, or float32 that is used unchanged
    labels    (n,) int64, the output column of each image; −1 for a class that is not used
    rows      (m,) int64
    pixels    (C·H·W,) int64, the order of the pixels, or None
    angle     the rotation in degrees, counter-clockwise
    weights   (m,), the probability that each row is drawn, or None: every row once per epoch
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
        """The output column of each row, (m,) int64."""
        return self.labels.index_select(0, self.rows)

    @property
    def is_whole(self) -> bool:
        """True if this part is every image, in order and unchanged, so that nothing needs copying."""
        n = len(self.images)
        return self.is_plain and len(self) == n and bool(torch.equal(self.rows, torch.arange(n)))

    @property
    def is_plain(self) -> bool:
        """True if pixels are neither permuted nor rotated."""
        return self.pixels is None and self.angle % 360 == 0

    def order(self, generator: torch.Generator) -> Tensor:
        """Draw the order of one epoch, (m,) int64: a shuffle, or with `weights` m draws with replacement."""
        return _draw_order(len(self), self.weights, generator)

    def chunks(self) -> Iterator[Tensor]:
        """Yield the images, permuted and rotated, a few thousand at a time."""
        table = None if self.angle % 360 == 0 else rotation_table(self.images.shape[2], self.images.shape[3], self.angle)
        for rows in self.rows.split(CHUNK):
            x = self.images.index_select(0, rows)
            if self.pixels is not None:  # numpy's take is faster here than index_select (2.5×)
                flat = x.reshape(len(x), -1).numpy().take(self.pixels.numpy(), axis=1)
                x = torch.from_numpy(flat).reshape(x.shape)
            yield x if table is None else rotate(x, *table)

    def resident(self, device: Device = "cpu", budget: int | None = None) -> Resident:
        """Put the images on the device, or, if they exceed `budget` bytes, into a memory map on disk. Batches are the same."""
        return make_resident(self, device, budget)


@dataclass(frozen=True, eq=False)
class Joined:
    """Several parts as one, each with its own permutation and head: the training data of joint training."""

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
        return _draw_order(len(self), None, generator)

    def resident(self, device: Device = "cpu", budget: int | None = None) -> Resident:
        return make_resident(self, device, budget)


class Resident:
    """Images ready for batches: x (m, C, H, W), y (m,) int64 output columns, and how to normalise.

    x is on `device`, except if `mapped`: then it is on the CPU, backed by a file or by the data set's own tensor (`rows` says which
    images), and each batch is moved. Do not write to x: tasks may share it.
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
        """Return x as float32, scaled and shifted. x itself does not change."""
        if x.is_cuda and x.dtype == torch.uint8 and isinstance(self._scale, float):
            return x * self._scale  # one kernel instead of two
        out = x.to(torch.float32, copy=True)
        if self._scale is not None:
            out.mul_(self._scale)
        return out if self._shift is None else out.sub_(self._shift)

    def affine(self) -> tuple[Tensor, Tensor | None]:
        """Return (scale, shift) of `normalise` on the device: one number per channel each, or one scale and None."""
        if self._affine is None:
            scale = 1.0 if self._scale is None else self._scale
            flat = scale.flatten() if isinstance(scale, Tensor) else torch.tensor([scale], device=self.device)
            self._affine = flat, None if self._shift is None else self._shift.flatten()
        return self._affine

    def raw(self, index: Tensor) -> Tensor:
        """Return the images of a flat index on the device, (k, C, H, W), not normalised."""
        if not self.mapped:
            return self.x.index_select(0, index)
        index = index.cpu()
        return self.x.index_select(0, index if self.rows is None else self.rows[index]).to(self.device)

    def batch(self, index: Tensor, *, augment: Augment | None = None, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return normalised float32 images and their output columns. An index of shape (…) gives (…, C, H, W) and (…)."""
        index = index.to(self.device)
        flat = index.reshape(-1)
        x = self.raw(flat)
        if augment is not None:
            x = augment(x, generator)
        out, y = self.normalise(x), self.y.index_select(0, flat)
        return (out, y) if index.ndim == 1 else (out.view(*index.shape, *out.shape[1:]), y.view(index.shape))


def make_resident(part: Part | Joined, device: Device = "cpu", budget: int | None = None) -> Resident:
    """Make a part resident; see `Part.resident`."""
    first = part.parts[0]
    shape = (len(part), *first.images.shape[1:])
    y = part.targets.to(device)
    size = math.prod(shape) * first.images.element_size()
    alone = len(part.parts) == 1
    if budget is not None and size > budget:
        if alone and first.is_plain:  # the data set's own tensor is in memory, or mapped from disk, already
            return Resident(first.images, y, mean=first.mean, std=first.std, rows=first.rows, mapped=True)
        return Resident(_write_scratch(part, shape), y, mean=first.mean, std=first.std, mapped=True)
    if alone and first.is_whole:
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


def _write_scratch(part: Part | Joined, shape: tuple[int, ...]) -> Tensor:
    """Write the images to a mapped file and unlink it at once: it disappears when the process ends, even if it is killed."""
    folder = make_folder(cache_dir() / "scratch")
    handle, path = tempfile.mkstemp(dir=folder, suffix=".bytes")
    os.close(handle)
    dtype = np.uint8 if part.parts[0].images.dtype == torch.uint8 else np.float32
    x = torch.from_numpy(np.memmap(path, dtype=dtype, mode="w+", shape=shape))
    with contextlib.suppress(OSError):  # Windows does not unlink a mapped file; there it stays in the cache
        os.unlink(path)
    _fill(x, part)
    return x


def _draw_order(n: int, weights: Tensor | None, generator: torch.Generator) -> Tensor:
    if weights is None:
        return torch.randperm(n, generator=generator, device=generator.device)
    return torch.multinomial(weights.to(generator.device), n, replacement=True, generator=generator)
