"""The processes that train one model together, and the few reductions over them that keeper and importance need.

W ranks have batches of M_r samples, M = Σ_r M_r. DistributedDataParallel and FSDP2 average gradients, so rank r needs a loss P_r with

    1/W Σ_r ∇P_r = ∇P,        P the penalty of one process on the batch of all ranks

    P = 1/M Σ_m φ(h_m)    a mean over samples     ∇P_r = W M_r/M · ∇P of the samples of r       `global_mean`: sends two numbers
    P = R(h_1 … h_M)      any other function      ∇P_r = W · ∂R/∂h_r, the other rows constant    `global_rows`: gathers the rows
    P = P(θ)              no samples              ∇P_r = ∇P                                      nothing to do

The value of P_r is P on each rank. A process alone computes what it would without this module, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 2**24  # entries that are reduced at a time
SAME = 1e-6  # relative difference of two sums that count as equal: other devices may add in another order


@dataclass(frozen=True)
class Ranks:
    """Some processes: how many, and which one this is. `group` is None for the default group of torch.distributed."""

    size: int = 1
    rank: int = 0
    group: Any = None

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    # ---------------------------------------------------------------------------------------------------------- sums and means
    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over ranks, in place. Small ones of one type travel together."""
        for bucket in () if self.is_alone else buckets(tensors):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                self._reduce(bucket[0])
                continue
            flat = torch.cat([t.reshape(-1) for t in bucket])
            self._reduce(flat)
            for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def mean_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over ranks, in place: what happens to gradients."""
        self.sum_(tensors)
        for tensor in () if self.is_alone else tensors:
            tensor /= self.size

    def count(self, number: int, device: torch.device) -> int:
        """Return the sum of a whole number over ranks."""
        if self.is_alone:
            return number
        total = torch.tensor(number, device=device)
        self._reduce(total)
        return int(total)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor of each rank; all have one shape."""
        if self.is_alone:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with self.talking():
            dist.all_gather(found, tensor.contiguous(), group=self.group)
        return found

    def gather_rows(self, rows: Tensor) -> list[Tensor]:
        """Return the rows of each rank, (M_r, …); the numbers of rows may differ."""
        if self.is_alone:
            return [rows]
        counts = [int(n) for n in self.gather(torch.tensor(len(rows), device=rows.device))]
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows
        return [found[:n] for found, n in zip(self.gather(padded), counts, strict=True)]

    def first(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the first rank, for random numbers that all ranks must share."""
        if self.is_alone:
            return tensor
        with self.talking():
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    # ------------------------------------------------------------------------------------------------------------- penalties
    def global_mean(self, means: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """P = Σ_r M_r/M P_r of some means P_r over M_r samples. Its value is P on each rank, its gradient W M_r/M · ∇P_r."""
        if self.is_alone or not means:
            return list(means)
        sizes = torch.tensor(counts, dtype=torch.float64, device=means[0].device)
        sums = torch.stack([m.detach().double() for m in means]) * sizes
        both = torch.stack([sums, sizes])
        self._reduce(both)
        values, shares = both[0] / both[1].clamp(min=1), self.size * sizes / both[1].clamp(min=1)
        # m − m.detach() is 0 and has the gradient of m
        return [value.to(m.dtype) + share.to(m.dtype) * (m - m.detach()) for m, value, share in zip(means, values, shares, strict=True)]

    def global_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks, (M, …). The gradient of the own rows is multiplied by W; the others are constants."""
        if self.is_alone:
            return rows
        found = self.gather_rows(rows.detach())
        found[self.rank] = rows.detach() + self.size * (rows - rows.detach())
        return torch.cat(found)

    # ----------------------------------------------------------------------------------------------------------------- checks
    def check_same(self, tensors: Mapping[str, Tensor], remedy: str) -> None:
        """Raise RuntimeError on each rank if these tensors differ between ranks. It compares Σx and ‖x‖ of each."""
        if self.is_alone or not tensors:
            return
        digests = torch.stack(self.gather(torch.stack([_digest(t) for t in tensors.values()])))  # (W, tensors, 2)
        gap = (digests - digests[:1]).abs().amax(2) > SAME * digests[:, :, 1].amax(0).clamp(min=1e-30)
        wrong = (gap | ~torch.isfinite(digests).all(2)).nonzero()
        if len(wrong):
            rank, i = wrong[0].tolist()
            norms = f"{float(digests[0, i, 1]):.6g} on rank 0, {float(digests[rank, i, 1]):.6g} on rank {rank}"
            raise RuntimeError(f"{list(tensors)[i]} differs between ranks (its norm is {norms}): {remedy}")

    def _reduce(self, tensor: Tensor) -> None:
        with self.talking():
            dist.all_reduce(tensor, group=self.group)

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Inside `with`: a failed connection is reported as a rank that stopped."""
        if self.is_alone:
            yield
            return
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} lost another rank, which has probably stopped: read the first error in its output. "
                "Start the job again from the last checkpoint"
            ) from error


ALONE = Ranks()


def find_ranks(group: Any = None) -> Ranks:
    """Return the ranks of a process group; None: all ranks, if torch.distributed is initialised; False: this process alone."""
    if group is False or not dist.is_available() or not dist.is_initialized():
        return ALONE
    return Ranks(dist.get_world_size(group), dist.get_rank(group), group)


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors of one type, with at most `BUCKET` entries unless it is a single tensor."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        first = bucket[0] if bucket else tensor
        is_full = sum(t.numel() for t in bucket) + tensor.numel() > BUCKET
        if bucket and (is_full or (tensor.dtype, tensor.device) != (first.dtype, first.device)):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _digest(tensor: Tensor) -> Tensor:
    """Return (Σx, ‖x‖) in float64."""
    x = tensor.detach()
    x = x if x.is_floating_point() else x.double()
    return torch.stack([x.sum(dtype=torch.float64), torch.linalg.vector_norm(x, dtype=torch.float64)])
