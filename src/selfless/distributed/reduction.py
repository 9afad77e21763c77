"""The sums of one measurement of Ω and α: of one process, over ranks that have whole parameters, or over ranks that share them.

    Ω = Σ_r Σ_{m ∈ r} |∂L_m/∂θ|ᵖ / Σ_r M_r

Sums and numbers of samples are added, not means, so ranks may have different numbers of samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from selfless.distributed.ranks import ALONE, Ranks
from selfless.distributed.shards import ShardedSums, agree, check_shards

NO_BATCHES = "rank {rank} has no batches of this task; give every rank some of its samples (DistributedSampler)"


class Reduction:
    """Sums of whole parameters. Each rank adds up its own samples; `finish` adds up the ranks."""

    def __init__(self, ranks: Ranks = ALONE, parameters: Mapping[str, Tensor] | None = None) -> None:
        self.ranks, self.parameters = ranks, parameters or {}
        self.is_live = True  # False for a batch that only keeps the ranks in step

    @property
    def is_sharded(self) -> bool:
        return False

    def sums(self) -> dict[str, Tensor]:
        """Return empty sums by parameter."""
        return {}

    def batches(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Return the batches that this rank runs."""
        return batches

    def check_names(self, names: Iterable[str], closed: bool) -> None:
        """Check the parameters of one backward pass; `closed`: all of them have a closed form."""

    def finish(self, omega: dict[str, Tensor], alpha: dict[str, Tensor], samples: int) -> int:
        """Add up the sums of all ranks, in place; return the number of their samples."""
        if self.ranks.is_alone:
            return samples
        device = next(iter(self.parameters.values())).device
        counts = [int(n) for n in self.ranks.gather(torch.tensor(samples, device=device))]
        if 0 in counts:
            raise ValueError(NO_BATCHES.format(rank=counts.index(0)))
        if not agree(self.ranks, sorted(alpha), device):
            raise ValueError("ranks measured α of different layers; pass layers=[…] with layers that run on every batch")
        self._sum_omega(omega)
        self.ranks.sum_([alpha[name] for name in sorted(alpha)])
        return sum(counts)

    def _sum_omega(self, omega: dict[str, Tensor]) -> None:
        names = sorted({*omega}) if agree(self.ranks, sorted(omega), next(iter(self.parameters.values())).device) else []
        if not names:  # a rank whose samples do not reach some parameter
            names = sorted(self.parameters)
            for name in names:
                p = self.parameters[name]
                omega.setdefault(name, torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)))
        self.ranks.sum_([omega[name] for name in names])


class ShardedReduction(Reduction):
    """Sums that are sharded like the parameters. Each layer is reduced in each batch, so that no rank ever has Ω of the whole model.

    Forward and backward passes of FSDP2 need all ranks. A rank without a batch left repeats its last one, with the weight 0; batches
    without samples are left out.
    """

    @property
    def is_sharded(self) -> bool:
        return True

    def sums(self) -> dict[str, Tensor]:
        return ShardedSums(self.parameters, self.ranks, lambda: self.is_live)

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        device = next(iter(self.parameters.values())).device
        rest, last, end = iter(batches), None, object()
        while True:
            batch = next((found for found in rest if not _is_empty(found)), end)
            self.is_live = batch is not end
            live = [bool(n) for n in self.ranks.gather(torch.tensor(self.is_live, device=device))]
            if not any(live):
                return
            if last is None and not all(live):
                raise ValueError(NO_BATCHES.format(rank=live.index(False)))
            last = batch if self.is_live else last
            yield last

    def check_names(self, names: Iterable[str], closed: bool) -> None:
        names = list(names)
        if not closed:
            raise ValueError(
                f"the importance of {names[0]!r} has no closed form, and per-sample gradients by vmap need the whole model, which FSDP2 "
                "shards: freeze it with requires_grad_(False), leave it out with parameters=, or train with DistributedDataParallel"
            )
        if not agree(self.ranks, sorted(names), next(iter(self.parameters.values())).device):
            raise ValueError("the samples of different ranks reach different parameters, which FSDP2's reductions cannot order; use DDP")

    def _sum_omega(self, omega: dict[str, Tensor]) -> None:
        """Do nothing: each batch was reduced."""


def _is_empty(batch: Any) -> bool:
    """Return True if a batch has a tensor without rows."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return any(isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == 0 for leaf in leaves)


def reduction_for(ranks: Ranks, parameters: Mapping[str, Tensor]) -> Reduction:
    """Return the reduction for these parameters: sharded, or whole."""
    return (ShardedReduction if check_shards(parameters, ranks) else Reduction)(ranks, parameters)
