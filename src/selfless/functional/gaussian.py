"""The Gaussian kernel of local inhibition, K_ij = exp(−(i−j)²/2σ²): as a matrix, as a band of diagonals, as Fourier features."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Constant = TypeVar("Constant")
_TOLERANCE = 1e-8  # absolute error allowed in each entry of the Gaussian kernel (its diagonal is 1)


CONSTANTS: dict[tuple[object, ...], object] = {}  # the cache of kernels


def _cached(make: Callable[[], Constant], like: Tensor, *key: object) -> Constant:
    """Return make() or its cached value. A kernel depends only on (N, σ), and computing it costs more than a training step."""
    key = (*key, like.device, like.dtype)
    found = CONSTANTS.get(key)
    if found is not None:
        return found  # type: ignore[return-value]
    value = make()
    if is_ordinary(like):
        if len(CONSTANTS) >= 64:
            CONSTANTS.clear()
        CONSTANTS[key] = value
    return value


def is_ordinary(like: Tensor) -> bool:
    """Return True if what is computed from `like` may be kept for later calls.

    Not traced tensors, and not those of functorch, inference mode or the private memory of a CUDA graph.
    """
    ordinary = type(like) in (Tensor, torch.nn.Parameter)  # not a fake tensor or another subclass
    ordinary = ordinary and not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
    return ordinary and not torch.is_inference_mode_enabled() and not (like.is_cuda and torch.cuda.is_current_stream_capturing())


def bell(gap: Tensor, sigma: float) -> Tensor:
    """exp(−gap²/2σ²), in the precision of gap / σ."""
    return torch.exp(-0.5 * (gap / sigma) ** 2)


def gaussian(n: int, sigma: float, like: Tensor) -> Tensor:
    """K_ij = exp(−(i−j)²/2σ²) with a zero diagonal, (N, N)."""

    def make() -> Tensor:
        i = torch.arange(n, device=like.device, dtype=torch.float64)
        gap = i[:, None] - i[None, :]
        return (bell(gap, sigma) * (gap != 0)).to(like.dtype)

    return _cached(make, like, "gaussian", n, sigma)


def band(sigma: float, like: Tensor) -> Tensor:
    """The diagonals of K that are not negligible, from −reach to reach, with a zero in the middle: (2·reach + 1,)."""

    def make() -> Tensor:
        gap = torch.arange(-reach(sigma), reach(sigma) + 1, device=like.device, dtype=torch.float64)
        return (bell(gap, sigma) * (gap != 0)).to(like.dtype)

    return _cached(make, like, "band", sigma)


def fourier(n: int, sigma: float, like: Tensor) -> tuple[Tensor, float]:
    """Return Φ (N, F) with ΦΦᵀ = K to 1e-7 (off the diagonal), and the constant value on the diagonal of ΦΦᵀ.

    The periodic Gaussian of period P is Σ_k c_k cos(2πk(i−j)/P), c_0 = σ√2π/P, c_k = 2c_0 exp(−2π²k²σ²/P²). Its copies are at a distance
    of at least P − (N−1), where they are negligible. cos(a − b) = cos a cos b + sin a sin b gives F = 2k_max + 1 features.
    """
    period, top = _period(n, sigma), (feature_count(n, sigma) - 1) // 2
    weights = [math.exp(-2 * (math.pi * sigma / period * k) ** 2) * (2 if k else 1) for k in range(top + 1)]
    weights = [sigma * math.sqrt(2 * math.pi) / period * w for w in weights]

    def make() -> Tensor:
        position = torch.arange(n, device=like.device, dtype=torch.float64)
        phase = position[:, None] * (2 * math.pi / period * torch.arange(top + 1, device=like.device, dtype=torch.float64))
        size = torch.tensor([math.sqrt(w) for w in weights], device=like.device, dtype=torch.float64)
        return torch.cat([phase.cos() * size, (phase.sin() * size)[:, 1:]], 1).to(like.dtype)

    return _cached(make, like, "fourier", n, sigma), sum(weights)


_CUTOFF = math.sqrt(-2 * math.log(_TOLERANCE))  # the x at which exp(−x²/2) equals the tolerance


def _period(n: int, sigma: float) -> float:
    """Return the shortest period P at which the next copy, at distance P − (N−1), is below the tolerance."""
    return n - 1 + _CUTOFF * sigma


def feature_count(n: int, sigma: float) -> int:
    """Return F = 1 + 2k, where k is the first frequency whose weight exp(−2π²k²σ²/P²) is below the tolerance: 25 at σ = N/6."""
    return 1 + 2 * math.ceil(_CUTOFF * _period(n, sigma) / (2 * math.pi * sigma))


def reach(sigma: float) -> int:
    """Return the largest distance i − j at which K_ij is above the tolerance."""
    return math.ceil(_CUTOFF * sigma)


def resolve_sigma(sigma: float | None, n: int) -> float:
    """Return σ, or for None the paper's N/6."""
    sigma = n / 6 if sigma is None else float(sigma)
    if not sigma > 0:
        raise ValueError(f"sigma is {sigma}; it must be positive (the paper uses N/6, the default)")
    return sigma
