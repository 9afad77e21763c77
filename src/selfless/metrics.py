"""Measures of a run, as pure functions of its accuracy matrix; intervals and tests over seeds.

A[t, u] is the accuracy on task u after learning task t, t, u = 1 … T. A is (T, T), or (1, T) if all tasks were learnt together.

- A may be a numpy array, a torch tensor or nested lists, in fractions or in percent. The arithmetic is float64.
- Entries above the diagonal (u > t, tasks not learnt yet) may be NaN. All other entries must be finite.
- A measure that compares "before" with "after" needs two rows. With one row it is NaN.
"""

import functools
import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "average",
    "backward_transfer",
    "forgetting",
    "forward_transfer",
    "holm",
    "learning_accuracy",
    "paired_interval",
    "paired_p_values",
    "paired_t_interval",
    "seeds_to_decide",
    "spread",
    "strongest_that_keeps",
    "student_cdf",
    "student_quantile",
    "summary",
]

Floats = NDArray[np.float64]


def average(A: "ArrayLike | Tensor") -> float:
    """1/T Σ_u A[T, u]: the mean accuracy over all tasks after learning the last one."""
    return float(_matrix(A)[-1].mean())


def learning_accuracy(A: "ArrayLike | Tensor") -> float:
    """1/T Σ_u A[u, u]: the mean accuracy on each task just after learning it. NaN if the tasks were learnt together."""
    A = _matrix(A)
    return float(A.diagonal().mean()) if A.shape[0] == A.shape[1] else np.nan


def forgetting(A: "ArrayLike | Tensor") -> float:
    """1/(T−1) Σ_{u<T} ( max_{t<T} A[t, u] − A[T, u] ): Chaudhry et al. 2018. The max ignores NaN entries. NaN if T = 1."""
    A = _matrix(A)
    return float((np.nanmax(A[:-1, :-1], axis=0) - A[-1, :-1]).mean()) if len(A) > 1 else np.nan


def backward_transfer(A: "ArrayLike | Tensor") -> float:
    """1/(T−1) Σ_{u<T} ( A[T, u] − A[u, u] ): Lopez-Paz & Ranzato 2017. Negative when tasks are forgotten. NaN if T = 1."""
    A = _matrix(A)
    return float((A[-1, :-1] - A.diagonal()[:-1]).mean()) if len(A) > 1 else np.nan


def forward_transfer(A: "ArrayLike | Tensor", baseline: "ArrayLike | Tensor") -> float:
    """1/(T−1) Σ_{u≥2} ( A[u−1, u] − b_u ): Lopez-Paz & Ranzato 2017. NaN if T = 1.

    baseline: (T,), b_u is the accuracy on task u of the network at its random initialisation (b_1 is not used). Each task must be
    evaluated before it is learnt: A[u−1, u] must not be NaN.
    """
    A, b = _matrix(A), _float64(baseline)
    if b.shape != (A.shape[1],):
        raise ValueError(f"baseline must hold one accuracy per task, shape ({A.shape[1]},), not {b.shape}")
    if len(A) == 1:
        return np.nan
    ahead = A.diagonal(1)
    if not np.isfinite(ahead).all() or not np.isfinite(b[1:]).all():
        raise ValueError("forward transfer needs the accuracy on each task before it is learnt: A[u-1, u] and baseline[u] must be finite")
    return float((ahead - b[1:]).mean())


def summary(A: "ArrayLike | Tensor", baseline: "ArrayLike | Tensor | None" = None) -> dict[str, float]:
    """Return all measures by name. `forward_transfer` is NaN without a baseline or without the entries A[u−1, u]."""
    A = _matrix(A)
    evaluated = baseline is not None and bool(np.isfinite(A.diagonal(1)).all())
    return {
        "average": average(A),
        "forgetting": forgetting(A),
        "backward_transfer": backward_transfer(A),
        "forward_transfer": forward_transfer(A, baseline) if evaluated and baseline is not None else np.nan,
        "learning_accuracy": learning_accuracy(A),
    }


def chance_of_hits(hits: int, n: int, p: float) -> float:
    """P(X ≥ hits) for X ~ Binomial(n, p): how likely guessing gets so many of n right, each with probability p."""
    if hits <= 0 or p >= 1:
        return 1.0
    logs = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(p) + (n - k) * math.log1p(-p)
            for k in range(hits, n + 1)]  # fmt: skip
    return min(1.0, math.fsum(map(math.exp, logs)))


def strongest_that_keeps(strengths: "ArrayLike", scores: "ArrayLike", reference: float | None, tolerance: float) -> int | None:
    """max {λ_i : s_i ≥ reference − tolerance}, as its number i; the weakest λ with a score if none keeps it, None if there is no score.

    It is the rule of thumb for a sparsifier, and "strong, then decay" for a preserver: start with the strongest and weaken it until the
    score is kept. A NaN stands for a run that failed. Without a `reference` it is the highest score.
    """
    s = _float64(scores)
    known = [i for i in range(len(s)) if not math.isnan(s[i])]
    floor = (max((s[i] for i in known), default=0.0) if reference is None else reference) - tolerance
    kept = [i for i in known if s[i] >= floor]
    by_strength = _float64(strengths).__getitem__
    return max(kept, key=by_strength) if kept else min(known, key=by_strength, default=None)


def spread(values: "ArrayLike | Tensor") -> tuple[float, float]:
    """(x̄, s), s² = 1/(n−1) Σ (x − x̄)²: mean and sample standard deviation over seeds. s is NaN for a single value."""
    x = _sample(values)
    return float(x.mean()), float(x.std(ddof=1)) if len(x) > 1 else np.nan


def paired_interval(
    a: "ArrayLike | Tensor",
    b: "ArrayLike | Tensor",
    seed: int = 0,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
) -> tuple[float, float]:
    """(low, high) = quantiles (1 ∓ level)/2 of the resampled means of d = a − b, with a and b paired by seed.

    This is the percentile bootstrap: each of `resamples` means is taken over n differences drawn with replacement. With few seeds the
    interval is too narrow; if n = 5 differences all have one sign, it never contains zero. One pair gives (NaN, NaN).
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, not {level}")
    d = _differences(a, b)
    if len(d) == 1:
        return np.nan, np.nan
    means = d[np.random.default_rng(seed).integers(len(d), size=(resamples, len(d)))].mean(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def student_cdf(t: float, dof: int) -> float:
    """F(t) of Student's distribution with an integer number of degrees of freedom ν, exactly.

    With θ = atan(t/√ν) and A = P(|T| ≤ |t|), F = (1 ± A)/2:
    ν even   A = sin θ Σ_{k<ν/2} c_k cos²ᵏθ,  c_0 = 1, c_k = c_{k−1} (2k−1)/2k
    ν odd    A = 2/π (θ + sin θ Σ_{k<(ν−1)/2} c_k cos²ᵏ⁺¹θ),  c_0 = 1, c_k = c_{k−1} 2k/(2k+1)   (Abramowitz & Stegun 26.7.3, 26.7.4)
    """
    if dof < 1:
        raise ValueError(f"Student's distribution needs at least one degree of freedom, not {dof}: two seeds or more")
    if math.isinf(t):
        return float(t > 0)
    theta, odd = math.atan(t / math.sqrt(dof)), dof % 2
    term, total = math.cos(theta) if odd else 1.0, 0.0
    for k in range(1, (dof - odd) // 2 + 1):
        total += term
        term *= math.cos(theta) ** 2 * (2 * k / (2 * k + 1) if odd else (2 * k - 1) / (2 * k))
    inside = 2 / math.pi * (theta + math.sin(theta) * total) if odd else math.sin(theta) * total
    return min(1.0, max(0.0, (1 + inside) / 2))  # rounding may leave the range by 1e-16


@functools.lru_cache(maxsize=1024)
def student_quantile(p: float, dof: int) -> float:
    """Return t with F(t) = p, by bisection."""
    if not 0 < p < 1:
        raise ValueError(f"p must lie between 0 and 1, not {p}")
    if p < 0.5:
        return -student_quantile(1 - p, dof)
    low, high = 0.0, 1.0
    while student_cdf(high, dof) < p:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if student_cdf(middle, dof) < p else (low, middle)
    return high


def paired_t_interval(a: "ArrayLike | Tensor", b: "ArrayLike | Tensor", *, level: float = 0.95) -> tuple[float, float]:
    """(low, high) = d̄ ∓ t s/√n with t = the quantile (1 + level)/2 of Student's distribution with n − 1 degrees of freedom, d = a − b.

    a and b are paired by seed. One pair gives (NaN, NaN).
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, not {level}")
    d = _differences(a, b)
    if len(d) == 1:
        return np.nan, np.nan
    half = student_quantile((1 + level) / 2, len(d) - 1) * _deviation(d) / math.sqrt(len(d))
    return float(d.mean()) - half, float(d.mean()) + half


def paired_p_values(a: "ArrayLike | Tensor", b: "ArrayLike | Tensor", margin: float = 0.0) -> tuple[float, float]:
    """(above, below): one-sided p-values for mean(a − b) > margin and for mean(a − b) < margin, by the paired t test.

    above = 1 − F(t), below = F(t), t = (d̄ − margin) √n / s. If all differences are equal there is nothing to test: the p-values are 0 and
    1, or 1 and 1 if they equal the margin. One pair gives (NaN, NaN).
    """
    d = _differences(a, b)
    if len(d) == 1:
        return np.nan, np.nan
    gap, deviation = float(d.mean()) - margin, _deviation(d)
    if not deviation:
        return float(gap <= 0), float(gap >= 0)
    t = gap * math.sqrt(len(d)) / deviation
    return student_cdf(-t, len(d) - 1), student_cdf(t, len(d) - 1)


def holm(p: "ArrayLike | Tensor") -> Floats:
    """Return Holm's adjusted p-values of a family of m tests: in ascending order, max_{j ≤ i} min(1, (m − j + 1) p_j).

    Rejecting where the adjusted value is at most 5 % makes one wrong rejection or more in the family with probability at most 5 %.
    """
    values = _float64(p)
    if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():
        raise ValueError("p-values must be a list of numbers from 0 to 1")
    order, adjusted = np.argsort(values, kind="stable"), np.empty_like(values)
    scaled = np.minimum(1.0, values[order] * np.arange(len(values), 0, -1))
    adjusted[order] = np.maximum.accumulate(scaled) if len(scaled) else scaled
    return adjusted


def seeds_to_decide(gap: float, deviation: float, *, level: float = 0.95, most: int = 1000) -> int | None:
    """Return the smallest n ≥ 2 with |gap| > t_{n−1} deviation/√n: how many seeds would decide if mean and deviation stayed as they are.

    gap = d̄ − margin, deviation = s, t the quantile (1 + level)/2. None if `most` seeds would not be enough.
    """
    if not gap:
        return None

    def decides(n: int) -> bool:
        return abs(gap) > student_quantile((1 + level) / 2, n - 1) * deviation / math.sqrt(n)

    if not decides(most):
        return None
    low, high = 1, most  # the width falls with n, so bisect
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high


def _differences(a: "ArrayLike | Tensor", b: "ArrayLike | Tensor") -> Floats:
    x, y = _sample(a), _sample(b)
    if x.shape != y.shape:
        raise ValueError(f"a and b must be paired, one value per seed in each; they have {len(x)} and {len(y)} values")
    return x - y


def _deviation(d: Floats) -> float:
    """s of the differences; 0 if they are equal up to rounding."""
    s = float(d.std(ddof=1))
    return s if s > 1e-12 * max(1.0, float(np.abs(d).max())) else 0.0


def _float64(values: "ArrayLike | Tensor") -> Floats:
    """Return a float64 array of a tensor (any device, any float type), an array or nested lists."""
    if hasattr(values, "detach"):  # a tensor; this test does not import torch
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def _matrix(A: "ArrayLike | Tensor") -> Floats:
    """Return A as float64 after checking its shape and that no needed entry is missing."""
    A = _float64(A)
    if A.ndim != 2 or A.size == 0 or A.shape[0] not in (1, A.shape[1]):
        raise ValueError(f"the accuracy matrix A[t, u] must be (T, T), or (1, T) for joint training, not {A.shape}")
    needed = np.tril(np.ones(A.shape, dtype=bool)) if len(A) > 1 else np.ones(A.shape, dtype=bool)
    missing = np.argwhere(needed & ~np.isfinite(A))
    if len(missing):
        t, u = missing[0]
        raise ValueError(
            f"A[{t}, {u}] is {A[t, u]}, but every task learnt so far must be evaluated. "
            "For an unfinished run, pass only the rows and columns of the tasks learnt so far"
        )
    return A


def _sample(values: "ArrayLike | Tensor") -> Floats:
    x = _float64(values)
    if x.ndim != 1 or len(x) == 0:
        raise ValueError(f"expected one value per seed, a list of at least one; got shape {x.shape}")
    return x
