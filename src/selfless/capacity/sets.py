"""The neurons that a task uses, and how the sets of tasks overlap.

Three definitions of "task t uses neuron i". The first has the scale of α; the other two are free of scale:

    by_threshold   α_i ≥ τ, τ = 1e-2: the paper's
    by_share       i is in the smallest set that carries 90 % of Σ α, α that of this task alone
    by_firing      i fires (h > 0) in at least 5 % of the task's samples

c_i counts the earlier tasks that use neuron i. It has a fixed size, whatever the number of tasks, and it suffices: with n = |U_t|,

    Σ_{s<t} |U_t ∩ U_s| = Σ_{i∈U_t} c_i        expected for a random set of n neurons:  n c̄,   variance:  n σ²_c (N − n)/(N − 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHARE, FIRING = 0.9, 0.05


def by_threshold(alpha: Tensor, threshold: float = 1e-2) -> Tensor:
    """α_i ≥ τ, (N,) of bool."""
    return alpha >= threshold


def by_share(alpha: Tensor, share: float = SHARE) -> Tensor:
    """The smallest set of neurons that carries `share` of Σ α, (…, N) of bool; empty if α = 0."""
    values, order = alpha.double().sort(dim=-1, descending=True, stable=True)
    before = values.cumsum(-1) - values  # what the larger ones carry
    return torch.zeros_like(alpha, dtype=torch.bool).scatter(-1, order, before < share * values.sum(-1, keepdim=True) * (1 - 1e-12))


def by_firing(rate: Tensor, least: float = FIRING) -> Tensor:
    """f_i ≥ 5 %, (N,) of bool, for the share f_i of samples in which neuron i fires."""
    return rate >= least


@dataclass(frozen=True)
class Use:
    """How a task's set of neurons lies among those of earlier tasks. The uses of several layers add up to that of the network.

    total      N
    used       neurons that some task uses, this one included
    shared     neurons that two tasks or more use
    now        neurons of this task, n
    new        neurons of this task that no earlier task uses
    earlier    the number of earlier tasks, S
    hits       Σ_{s<t} |U_t ∩ U_s|
    expected   its mean if the task had drawn n neurons at random
    variance   its variance then
    """

    total: int
    used: int
    shared: int
    now: int
    new: int
    earlier: int
    hits: float = 0.0
    expected: float = 0.0
    variance: float = 0.0

    def __add__(self, other: Use) -> Use:
        if self.earlier != other.earlier:
            raise ValueError(f"uses after {self.earlier} and after {other.earlier} earlier tasks do not add up")
        sums = {n: getattr(self, n) + getattr(other, n) for n in ("total", "used", "shared", "now", "new", "hits", "expected", "variance")}
        return Use(earlier=self.earlier, **sums)

    @property
    def free(self) -> int:
        """Neurons that no task uses."""
        return self.total - self.used

    @property
    def overlap(self) -> float:
        """The share of this task's neurons that an earlier task uses too, mean over earlier tasks. NaN without one."""
        return self.hits / (self.now * self.earlier) if self.now and self.earlier else math.nan

    @property
    def chance(self) -> float:
        """What `overlap` would be for a random set of the same size."""
        return self.expected / (self.now * self.earlier) if self.now and self.earlier else math.nan

    @property
    def deviation(self) -> float:
        """(hits − expected) / standard deviation by chance: below −2 tasks avoid each other's neurons, above 2 they share them."""
        return (self.hits - self.expected) / math.sqrt(self.variance) if self.variance > 0 else math.nan

    def as_dict(self) -> dict[str, float | int | None]:
        """Return plain values for JSON; None stands for NaN."""
        counts: dict[str, float | int | None] = {n: getattr(self, n) for n in ("total", "free", "used", "shared", "now", "new")}
        shares = {n: getattr(self, n) for n in ("overlap", "chance", "deviation")}
        return counts | {n: v if math.isfinite(v) else None for n, v in shares.items()}


def compare(now: Tensor, counts: Tensor, earlier: int) -> Use:
    """Return how this task's set `now` (N,) of bool lies among those of `earlier` tasks, by the counts c (N,) of their sets."""
    return compare_members(now.unsqueeze(0), counts.unsqueeze(0), [earlier])[0]


def compare_members(now: Tensor, counts: Tensor, earlier: Sequence[int]) -> list[Use]:
    """Return `compare` of every member, for sets and counts (F, N), and the number of earlier tasks of each."""
    now, c = now.bool().cpu(), counts.double().cpu()
    total, after = now.shape[1], c + now
    counted = [column.double().sum(1) for column in (after > 0, after > 1, now, now & (c == 0), c * now)]
    sums = torch.stack([*counted, c.mean(1), c.var(1, correction=0)], 1).tolist()
    return [
        Use(
            total=total,
            used=int(used),
            shared=int(shared),
            now=int(n),
            new=int(new),
            earlier=tasks,
            hits=hits,
            expected=n * mean,
            variance=n * variance * (total - n) / (total - 1) if total > 1 else 0.0,
        )
        for tasks, (used, shared, n, new, hits, mean, variance) in zip(earlier, sums, strict=True)
    ]
