"""What the activations h of a layer are like: sums over samples, and the measures that follow from them.

    fires            h > 0
    active           1/N Σ_i f_i,  f_i = share of samples in which neuron i fires
    dead             #{i : f_i = 0}
    lifetime         mean over neurons that fire:  (1 − (E_m|h|)² / E_m h²) / (1 − 1/M)      0: the same in every sample, 1: in one alone
    population       mean over samples:            (1 − (E_i|h|)² / E_i h²) / (1 − 1/N)      0: all neurons alike, 1: one neuron alone
    correlation      mean over pairs i < j of |ρ_ij|, of neurons that vary
    rank             (Σ λ)² / Σ λ² = (tr C)² / ‖C‖²_F,  C the covariance, λ its eigenvalues: N if they are equal, 1 if one is not 0

Lifetime and population sparsity are those of Vinje and Gallant (2000), after Treves and Rolls; the effective rank is the participation
ratio. All of these are free of scale: c·h with c > 0 has the same. Every sum may have leading axes, as (F, N) for the F members of a fleet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_PAIRS = 1024  # correlation and rank of a wider layer are those of so many neurons, evenly spaced
SUMS = ("total", "size", "square", "fired", "pairs", "spread", "awake")
AT_ONCE = {"cuda": 2**24}  # numbers of h that are summed at once, 2¹⁸ elsewhere: what the sums need beside h
EVERY_POSITION = 64  # positions of a feature map, or tokens, that are read of each sample, evenly spaced


@dataclass(frozen=True)
class Activity:
    """Sums over the M rows of h (…, M, N). Activities of two batches add up: a + b.

    rows    M
    total   Σ_m h (…, N)
    size    Σ_m |h| (…, N)
    square  Σ_m h² (…, N)
    fired   #{m : h > 0} (…, N)
    pairs   Σ_m h hᵀ (…, n, n) of at most `most` neurons
    spread  Σ_m population sparsity of sample m (…,)
    awake   #{m : h ≠ 0} (…,)
    """

    rows: int
    total: Tensor
    size: Tensor
    square: Tensor
    fired: Tensor
    pairs: Tensor
    spread: Tensor
    awake: Tensor

    def __add__(self, other: Activity) -> Activity:
        return Activity(self.rows + other.rows, *(getattr(self, name) + getattr(other, name) for name in SUMS))

    def of_member(self, m: int) -> Activity:
        """Return the sums of one member of a fleet."""
        return Activity(self.rows, *(getattr(self, name)[m] for name in SUMS))

    def as_fleet(self) -> Activity:
        """Return the same sums as those of a fleet with one member."""
        return Activity(self.rows, *(getattr(self, name).unsqueeze(0) for name in SUMS))

    def cpu(self) -> Activity:
        """Return the same sums in the memory of the CPU."""
        return Activity(self.rows, *(getattr(self, name).cpu() for name in SUMS))

    # ------------------------------------------------------------------------------------------------------------ measures
    @property
    def rate(self) -> Tensor:
        """f_i: the share of samples in which each neuron fires, (…, N)."""
        return self.fired / self.rows

    def lifetime(self) -> float:
        """Mean lifetime sparsity of the neurons that are not silent; NaN if all are."""
        heard = self.square > 0
        if self.rows < 2 or not bool(heard.any()):
            return float("nan")
        each = (1 - (self.size / self.rows).square() / (self.square / self.rows)) / (1 - 1 / self.rows)
        return float(each[heard].mean())

    def population(self) -> float:
        """Mean population sparsity of the samples that any neuron answers; NaN if none does, or with one neuron."""
        return float(self.spread / self.awake) if bool(self.awake > 0) else float("nan")

    def covariance(self) -> Tensor:
        """C = E_m hhᵀ − h̄h̄ᵀ, (n, n)."""
        mean = _spaced(self.total, -1, self.pairs.shape[-1]) / self.rows
        return self.pairs / self.rows - mean.unsqueeze(-1) * mean.unsqueeze(-2)

    def correlation(self) -> float:
        """Mean |ρ_ij| over the pairs of neurons that vary; NaN with fewer than two."""
        c = self.covariance()
        varies = c.diagonal() > 1e-12 * self.pairs.diagonal() / self.rows
        n = int(varies.sum())
        if n < 2:
            return float("nan")
        c = c[varies][:, varies]
        scale = c.diagonal().sqrt()
        rho = (c / scale / scale.unsqueeze(-1)).abs().clamp(max=1)
        return float((rho.sum() - rho.diagonal().sum()) / (n * (n - 1)))

    def rank(self) -> float:
        """(tr C)² / ‖C‖²_F; 0 if nothing varies."""
        c = self.covariance()
        trace, norm = c.diagonal().sum(), c.square().sum()
        return float(trace.square() / norm) if bool(trace > 1e-12 * self.pairs.diagonal().sum() / self.rows) else 0.0

    def measures(self) -> dict[str, list[float]]:
        """Return the measures of all members, of sums (F, …): dead, active, lifetime, population, correlation, rank. It waits once."""
        heard, nan = self.square > 0, torch.full_like(self.spread, torch.nan)
        each = (1 - (self.size / self.rows).square() / (self.square / self.rows)) / (1 - 1 / max(self.rows, 2))
        lifetime = torch.where(heard, each, 0.0).sum(-1) / heard.sum(-1) if self.rows > 1 else nan  # 0/0 is NaN
        c = self.covariance()
        trace, scale, raw = c.diagonal(dim1=-2, dim2=-1), c.diagonal(dim1=-2, dim2=-1).sqrt(), self.pairs.diagonal(dim1=-2, dim2=-1)
        varies = trace > 1e-12 * raw / self.rows
        both = varies.unsqueeze(-1) & varies.unsqueeze(-2)
        rho = torch.where(both, (c / scale.unsqueeze(-2) / scale.unsqueeze(-1)).abs().clamp(max=1), 0.0)
        n = varies.sum(-1)
        correlation = torch.where(n > 1, (rho.sum((-2, -1)) - rho.diagonal(dim1=-2, dim2=-1).sum(-1)) / (n * (n - 1)), nan)
        is_alive = trace.sum(-1) > 1e-12 * raw.sum(-1) / self.rows
        rank = torch.where(is_alive, trace.sum(-1).square() / c.square().sum((-2, -1)), 0.0)
        found = {
            "dead": (self.rate == 0).sum(-1),
            "active": self.rate.mean(-1),
            "lifetime": lifetime,
            "population": torch.where(self.awake > 0, self.spread / self.awake, nan),
            "correlation": correlation,
            "rank": rank,
        }
        return dict(zip(found, torch.stack([values.double() for values in found.values()]).tolist(), strict=True))


@torch.no_grad()
def observe(h: Tensor, most: int = MOST_PAIRS) -> Activity:
    """Return the sums of activations h (…, M, N), in float64, some rows at a time; pairs of at most `most` neurons."""
    first, *others = h.split(max(1, AT_ONCE.get(h.device.type, 2**18) * h.shape[-2] // max(h.numel(), 1)), -2)
    found = _observe(first, most)
    for rows in others:
        found = found + _observe(rows, most)
    return found


def _observe(h: Tensor, most: int) -> Activity:
    h = h.double()
    size, square, n = h.abs(), h.square(), h.shape[-1]
    by_sample = square.mean(-1)
    awake = (by_sample > 0) & (n > 1)
    spread = (1 - size.mean(-1).square() / by_sample.clamp(min=1e-300)) / (1 - 1 / max(n, 2))
    few = _spaced(h, -1, most)
    return Activity(
        h.shape[-2],
        h.sum(-2),
        size.sum(-2),
        square.sum(-2),
        (h > 0).sum(-2).double(),
        few.mT @ few,
        (spread * awake).sum(-1),
        awake.sum(-1).double(),
    )


def rows_of(h: Tensor, axis: int) -> Tensor:
    """Return h (F, B, …) of F members as (F, rows, N): neurons from `axis`, every position of a sample a row, at most 64 of them."""
    h = h.movedim(axis, -1).flatten(2, -2) if h.dim() > 3 else h.unsqueeze(2)
    return _spaced(h, 2, EVERY_POSITION).flatten(1, 2)


def _spaced(t: Tensor, axis: int, most: int) -> Tensor:
    """Return at most `most` entries of an axis, evenly spaced; all of them if there are not more."""
    n = t.shape[axis]
    if n <= most:
        return t
    return t.index_select(axis, torch.linspace(0, n - 1, most, device=t.device).round().long())
