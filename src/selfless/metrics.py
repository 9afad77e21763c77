"""Measures of a run, as pure functions of its accuracy matrix.

A[t, u] is the accuracy on task u after learning task t, t, u = 1 … T. A is (T, T), or (1, T) if all tasks were learnt together.

- A may be a numpy array, a torch tensor or nested lists, in fractions or in percent. The arithmetic is float64.
- Entries above the diagonal (u > t, tasks not learnt yet) may be NaN. All other entries must be finite.
- A measure that compares "before" with "after" needs two rows. With one row it is NaN.
"""

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
    "learning_accuracy",
    "paired_interval",
    "spread",
    "strongest_that_keeps",
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


def strongest_that_keeps(strengths: "ArrayLike", scores: "ArrayLike", reference: float, tolerance: float) -> int | None:
    """max {λ_i : s_i ≥ reference − tolerance}, as its number i; the weakest λ with a score if none keeps it, None if there is no score.

    It is the rule of thumb for a sparsifier, and "strong, then decay" for a preserver: start with the strongest and weaken it until the
    score is kept. A NaN stands for a run that failed.
    """
    s = _float64(scores)
    known = [i for i in range(len(s)) if not math.isnan(s[i])]
    kept = [i for i in known if s[i] >= reference - tolerance]
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
    x, y = _sample(a), _sample(b)
    if x.shape != y.shape:
        raise ValueError(f"a and b must be paired, one value per seed in each; they have {len(x)} and {len(y)} values")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, not {level}")
    if len(x) == 1:
        return np.nan, np.nan
    d = x - y
    means = d[np.random.default_rng(seed).integers(len(d), size=(resamples, len(d)))].mean(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


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
