"""The data of a fleet on its device: one copy of the images, and a batch is a selection of rows in each member's own order.

Members with the same task (the same seed, other strengths) share its images. Different tasks are concatenated into one tensor, and
`offset` is the first row of each member.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from selfless.data import Augment, Joined, Part, Resident
from selfless.engine import rng
from selfless.engine.native.hardware import kernels, memory_of

_uploaded: Any = WeakTensorKeyDictionary()  # a source's images → their copy on the GPU
EVALUATE = 1000  # samples per pass on a CPU


class Numbers(NamedTuple):
    """What a network computes for one sample: `total` numbers in all its layers, at most `largest` in one, of `size` bytes each."""

    total: int
    largest: int
    size: int


class FleetData:
    """One part (a task's training or test data) for every member of a fleet: n samples each."""

    def __init__(self, parts: Sequence[Part | Joined], device: torch.device, budget: int | None = None) -> None:
        unique = {id(part): part for part in parts}
        sizes = {len(part) for part in unique.values()}
        if len(sizes) > 1:
            raise ValueError(f"the members of a fleet have tasks of {sorted(sizes)} samples; put only tasks of one size into a fleet")
        self.n = sizes.pop()
        share = None if budget is None else budget // len(unique)
        residents = [_permute_on_gpu(part, device, share) or part.resident(device, share) for part in unique.values()]
        self.first = residents[0]
        numbers = {key: i for i, key in enumerate(unique)}
        self.offset = torch.tensor([numbers[id(part)] * self.n for part in parts], device=device)
        self._residents = residents
        self._x = (
            residents[0].x if len(residents) == 1 else None if any(r.mapped for r in residents) else torch.cat([r.x for r in residents])
        )
        self.y = torch.cat([r.y for r in residents])
        if self._x is not None and len(residents) > 1:  # free the memory of the single parts
            self.first, self._residents = copy.copy(residents[0]), []
            self.first.x = self._x
        first = next(iter(unique.values()))
        self.weights = None
        if first.weights is not None:
            stacked = torch.stack([part.weights for part in unique.values() if part.weights is not None])
            self.weights = stacked.to(device)[[numbers[id(part)] for part in parts]]

    def batch(
        self, index: Tensor, augment: Augment | None = None, noise: Callable[[int, int], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return float32 x (F, B, C, H, W) and y (F, B) of the samples `index` (F, B), which count within each member's task."""
        flat = (index + self.offset[:, None]).flatten()
        x = self._raw(index, flat)
        if augment is not None:
            x = augment(x, noise)
        x = self.first.normalise(x)
        return x.view(*index.shape, *x.shape[1:]), self.y.index_select(0, flat).view(index.shape)

    def of(self, members: slice) -> FleetData:
        """Return the same data for some of the members."""
        found = copy.copy(self)
        found.offset = self.offset[members]
        found.weights = None if self.weights is None else self.weights[members]
        return found

    def _raw(self, index: Tensor, flat: Tensor) -> Tensor:
        """Return the images as stored; `flat` are the rows in the concatenated tensor."""
        if self._x is not None:
            return self.first.raw(flat) if self.first.mapped else self._x.index_select(0, flat)
        numbers = (self.offset // self.n).tolist()  # memory-mapped files of several tasks are not concatenated
        return torch.cat([self._residents[i].raw(rows) for i, rows in zip(numbers, index, strict=True)])

    @property
    def positive(self) -> bool:
        """True if no input is below zero: bytes that are scaled but not shifted."""
        return self.first.x.dtype == torch.uint8 and self.first.affine()[1] is None

    def next(
        self, order: Tensor, cursor: Tensor, size: int, dtype: torch.dtype, augment: Augment | None = None, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Return the next `size` samples of every member's order, from position `cursor` on, in one GPU kernel; None without a kernel.

        keys   (3, F), of the random numbers of a crop and a flip: down, across, mirrored
        """
        fast = kernels(self.offset)
        resizes = augment is not None and (augment.resized is not None or augment.centre is not None)
        if fast is None or self._x is None or self.first.mapped or resizes:
            return None
        scale, shift = self.first.affine()
        changes = {} if augment is None else {"crop": augment.crop, "flip": augment.flip, "keys": keys}
        found: tuple[Tensor, Tensor] = fast.gather(self._x, self.y, order, self.offset, cursor, size, scale, shift, dtype, **changes)
        return found

    def at_once(self, numbers: Numbers, mixes: bool, least: int = EVALUATE, *, trains: bool = False) -> int:
        """Return how many samples per member to put into one pass of a network that computes `numbers` for a sample.

        On a GPU a few large passes are fastest: launching the kernels of many small ones takes longer than the kernels. One pass fills at
        most an eighth of the memory, and a tensor has less than 2³¹ numbers because kernels count in 32 bits.

        mixes    the network evaluates a sample with statistics of its pass, so that the size must not depend on the number of members; then
                 both limits are those of one member
        trains   a backward pass follows, so that all activations are kept and gradients join them; else only those of a layer or two
        """
        members = 1 if mixes else len(self.offset)
        if self.offset.device.type == "cpu":
            return max(least, EVALUATE // members)
        memory = memory_of(self.offset.device) // 8
        fitting = memory // (members * numbers.total * numbers.size * (3 if trains else 2))
        return max(1, min(EVALUATE if mixes else self.n, fitting, (2**31 - 1) // (members * numbers.largest)))

    def passes(self, size: int = EVALUATE, augment: Augment | None = None, order: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every sample once, for evaluation and importance; or the samples in `order` (F, n)."""
        members = len(self.offset)
        for start in range(0, self.n, size):
            rows = torch.arange(start, min(start + size, self.n), device=self.offset.device).expand(members, -1)
            yield self.batch(rows if order is None else order[:, start : start + size], augment)

    def order(self, seeds: Tensor, task: int, epoch: int) -> Tensor:
        """Return the order of each member's samples in this epoch, (F, n)."""
        return self.order_by(rng.stream_key(seeds, "order", task, epoch))

    def order_by(self, key: Tensor) -> Tensor:
        """Return the order of each member's samples by its key, (F, n)."""
        return rng.order(key, self.n, self.weights)


def _permute_on_gpu(part: Part | Joined, device: torch.device, budget: int | None) -> Resident | None:
    """Select and permute the images of a part on the GPU, from one copy of its source there; None if that is not possible.

    The result has the same bytes as `part.resident`, which does the work on the CPU.
    """
    if device.type != "cuda" or not isinstance(part, Part) or part.angle % 360 != 0:
        return None
    if budget is not None and part.images.nbytes > budget:
        return None
    if part.images not in _uploaded:
        _uploaded[part.images] = part.images.to(device)
    x = _uploaded[part.images].index_select(0, part.rows.to(device))
    if part.pixels is not None:
        x = x.flatten(1).index_select(1, part.pixels.to(device)).view(x.shape)
    return Resident(x, part.targets.to(device), mean=part.mean, std=part.std)
