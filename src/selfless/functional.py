"""The formulas, as pure functions of tensors.

Conventions, declared once. `h` holds post-activations of one layer: M samples × N neurons. Accepted shapes:

    (M, N)         a fully connected layer
    (M, T, N)      a transformer's MLP: every token is a sample
    (M, C, H, W)   a convolution (also (M, C, D, H, W)): neurons are channels, every position is a sample

Sums over pairs run over i ≠ j with both orders counted; they are divided by the number of samples and not by N.
The reference is Aljundi, Rohrbach and Tuytelaars, *Selfless Sequential Learning*, ICLR 2019, unless a docstring says otherwise.

**Signed activations.** The paper assumes h ≥ 0 (ReLU), where every product hᵢhⱼ costs. With GELU, tanh or SiLU the same formula
also *rewards* pairs of opposite sign, so R can be negative; it then pushes Σᵢhᵢ towards 0 rather than each neuron. `absolute=True`
penalises |hᵢ||hⱼ| instead, which is R of the paper for non-negative h and drives any activation to use few neurons.

**Precision.** Half precisions are computed in float32 (autocast included) and the value is returned in float32. Beyond N = 128 a sum over
pairs is a square of sums minus a sum of squares: its error is about 10⁻⁷ of Σ_i h_i², which is far below the value unless hardly any two
neurons are active together. TF32, where it is allowed for matmuls, applies here as anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Discount = Literal["product", "max"]
Constant = TypeVar("Constant")

DENSE = 128  # up to this width the N×N kernel is the quickest form; above it no N×N tensor is made
_BLOCK = 64  # neurons a block in the `max` discount: cost O(M·N·block)
_TOLERANCE = 1e-8  # absolute error allowed in each entry of the Gaussian kernel (its diagonal is 1)


# ---------------------------------------------------------------------------------------------- penalties on activations
def sni(h: Tensor, *, absolute: bool = False) -> Tensor:
    """Sparsity through neural inhibition:  R = 1/M Σ_{i≠j} Σ_m hᵢ hⱼ,  h: (M, N).

    Equals mean_m [(Σᵢ hᵢ)² − Σᵢ hᵢ²], which is how it is computed.
    """
    h = samples(h, absolute)
    return (h.sum(1).square() - h.square().sum(1)).mean()


def slni(h: Tensor, sigma: float | None = None, *, absolute: bool = False) -> Tensor:
    """Local inhibition:  R = 1/M Σ_{i≠j} exp(−(i−j)²/2σ²) Σ_m hᵢ hⱼ,  h: (M, N),  σ = N/6 unless given.

    Up to N = 128 with the N×N kernel, above with its Fourier features Φ (N, F): R = 1/M (‖hΦ‖² − Σ K̂ᵢᵢ h²), O(M·N·F).
    """
    return _local(samples(h, absolute), sigma)


def snid(h: Tensor, alpha: Tensor, discount: Discount = "product", *, absolute: bool = False) -> Tensor:
    """SNI, discounted:  R = 1/M Σ_{i≠j} D_ij Σ_m hᵢ hⱼ,  h: (M, N),  α: (N,).

    D_ij = exp(−(αᵢ+αⱼ)) for `discount="product"` (the paper), exp(−max(αᵢ, αⱼ)) for `"max"` (the authors' last release):
    pairs that earlier tasks need are spared.
    """
    h, d = _discounted(h, alpha, discount, absolute)
    if discount == "product":
        return sni(h * d)
    return _pairs_min(h, d, None)


def slnid(h: Tensor, alpha: Tensor, sigma: float | None = None, discount: Discount = "product", *, absolute: bool = False) -> Tensor:
    """SLNI, discounted:  R = 1/M Σ_{i≠j} D_ij exp(−(i−j)²/2σ²) Σ_m hᵢ hⱼ,  h: (M, N),  α: (N,),  σ = N/6 unless given.

    D as in `snid`. This is the paper's SLNID, Selfless Sequential Learning's own penalty.
    """
    h, d = _discounted(h, alpha, discount, absolute)
    if discount == "product":
        return _local(h * d, sigma)
    return _pairs_min(h, d, _sigma(sigma, h.shape[1]))


def pair_weights(
    n: int,
    like: Tensor,
    *,
    sigma: float | None = None,
    everywhere: bool = False,
    alpha: Tensor | None = None,
    discount: Discount = "product",
) -> Tensor:
    """S (N, N) of the four inhibitions, as in R = 1/M Σ_m hᵀSh: S_ij = K_ij D_ij off the diagonal, K = 1 where `everywhere`.

    For whoever needs the gradient 2Sh/M more often than S changes (`selfless.engine`).
    """
    kernel = 1 - torch.eye(n, device=like.device, dtype=like.dtype) if everywhere else _gaussian(n, _sigma(sigma, n), like)
    if alpha is None:
        return kernel
    d = torch.exp(-alpha.to(like.dtype))
    return kernel * (d[:, None] * d if discount == "product" else torch.minimum(d[:, None], d))


def pair_factors(
    n: int, like: Tensor, *, sigma: float | None = None, everywhere: bool = False, alpha: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """(A (N, r), d (N,)) with S = AAᵀ − diag d, r ≪ N: `pair_weights` without an N×N matrix. None where r would not be small."""
    if everywhere:
        features, diagonal = torch.ones(n, 1, device=like.device, dtype=like.dtype), 1.0
    else:
        sigma = _sigma(sigma, n)
        if 4 * _feature_count(n, sigma) > n:
            return None
        features, diagonal = _fourier(n, sigma, like)
    d = torch.ones(n, device=like.device, dtype=like.dtype) if alpha is None else torch.exp(-alpha.to(like.dtype))
    return features * d[:, None], diagonal * d.square()


def l1_rep(h: Tensor) -> Tensor:
    """Sparse representation:  R = 1/M Σ_m Σᵢ |hᵢ|,  h: (M, N)."""
    return samples(h, absolute=True).sum(1).mean()


def decov(h: Tensor) -> Tensor:
    """DeCov (Cogswell et al., ICLR 2016):  R = ½ (‖C‖²_F − ‖diag C‖²),  C = 1/M Σ_m (h−h̄)(h−h̄)ᵀ,  h: (M, N).

    ‖C‖²_F is also ‖XXᵀ‖²_F/M² for the centred X (M, N): the smaller of the two Gram matrices is formed.
    """
    x = samples(h)
    m, n = x.shape
    x = x - x.mean(0)
    with _exact(x):
        gram = x.T @ x if n <= m else x @ x.T
    return 0.5 * (gram.square().sum() - x.square().sum(0).square().sum()) / m**2


# ------------------------------------------------------------------------------------------------- penalties on weights
def l1_param(weights: Tensor | Iterable[Tensor]) -> Tensor:
    """R = Σ_k |θ_k| over one tensor or several."""
    return _total([w.abs().sum() for w in _listed(weights)])


def l2_param(weights: Tensor | Iterable[Tensor]) -> Tensor:
    """R = Σ_k θ_k² over one tensor or several: weight decay (an optimizer's `weight_decay` w equals a strength of w/2)."""
    return _total([w.square().sum() for w in _listed(weights)])


def orth_reg(weight: Tensor, sharpness: float = 10.0) -> Tensor:
    """OrthReg (Rodríguez et al., ICLR 2017):  R = Σ_{i≠j} log(1 + exp(λ (cos(wᵢ, wⱼ) − 1))),  λ = 10,  w: (N, …).

    Rows wᵢ are the incoming weights of neuron i, of a linear layer or (flattened) of a convolution. Locally constrained: pairs
    that point the same way are pushed apart, negative correlations are left alone. Forms the N×N cosines.
    """
    rows = F.normalize(_wide(weight).flatten(1), dim=1)
    with _exact(rows):
        costs = F.softplus(sharpness * (rows @ rows.T - 1))
    return costs.sum() - costs.diagonal().sum()


# ---------------------------------------------------------------------------------------------------------- the machinery
def samples(h: Tensor, absolute: bool = False) -> Tensor:
    """`h` as (samples, neurons) in float32 or wider: tokens and positions become samples. |h| when `absolute`."""
    if h.dim() == 3:
        h = h.flatten(0, 1)
    elif h.dim() >= 4:
        h = h.movedim(1, -1).flatten(0, -2)
    elif h.dim() != 2:
        raise ValueError(
            f"h has shape {tuple(h.shape)}; expected (samples, neurons), (batch, tokens, neurons) or (batch, channels, height, "
            f"width). Unflatten a single sample with h.unsqueeze(0)."
        )
    h = _wide(h)
    return h.abs() if absolute else h


def _local(h: Tensor, sigma: float | None) -> Tensor:
    """1/M Σ_{i≠j} K_ij Σ_m hᵢ hⱼ with the Gaussian K: dense, by a band or by Fourier features, whichever is cheapest."""
    n = h.shape[1]
    sigma = _sigma(sigma, n)
    with _exact(h):
        if n <= DENSE:
            return ((h @ _gaussian(n, sigma, h)) * h).sum(1).mean()
        if _reach(sigma) < _feature_count(n, sigma):  # σ of a few neurons: a short convolution
            near = F.conv1d(h.unsqueeze(1), _band(sigma, h).view(1, 1, -1), padding=_reach(sigma)).squeeze(1)
            return (near * h).sum(1).mean()
        features, diagonal = _fourier(n, sigma, h)
        return ((h @ features).square().sum(1) - diagonal * h.square().sum(1)).mean()


def _pairs_min(h: Tensor, d: Tensor, sigma: float | None) -> Tensor:
    """1/M Σ_{i≠j} K_ij min(dᵢ, dⱼ) Σ_m hᵢ hⱼ  (K = 1 when σ is None), without an N×N tensor for large N.

    Sort neurons by d, so that min(dᵢ, dⱼ) is d of the earlier one, and cut the order into blocks. Pairs within a block are summed
    directly; pairs across blocks factor through K's features: Σ_b ⟨Σ_{i∈b} dᵢφ(i)hᵢ, Σ_{j in later blocks} φ(j)hⱼ⟩, twice.
    """
    n = h.shape[1]
    with _exact(h):
        if n <= DENSE:
            kernel = 1 - torch.eye(n, device=h.device, dtype=h.dtype) if sigma is None else _gaussian(n, sigma, h)
            return ((h @ (kernel * torch.minimum(d[:, None], d[None, :]))) * h).sum(1).mean()
        if sigma is not None and _reach(sigma) < _feature_count(n, sigma):  # σ of a few neurons: neighbours only
            near = torch.exp(-0.5 * (torch.arange(1, _reach(sigma) + 1, device=h.device, dtype=torch.float64) / sigma) ** 2).to(h.dtype)
            pairs = [near[k - 1] * torch.minimum(d[k:], d[:-k]) * h[:, k:] * h[:, :-k] for k in range(1, min(n, len(near) + 1))]
            return 2 * torch.stack([p.sum(1) for p in pairs]).sum(0).mean()
        order = torch.argsort(d)
        pad = -n % _BLOCK
        at = F.pad(order, (0, pad)).view(-1, _BLOCK)  # the neuron at each place, (blocks, block)
        h = F.pad(h[:, order], (0, pad)).view(h.shape[0], -1, _BLOCK).transpose(0, 1)  # (blocks, M, block), padded with zeros
        d = F.pad(d[order], (0, pad)).view(-1, _BLOCK)
        weight = torch.minimum(d[:, :, None], d[:, None, :]) * (1 - torch.eye(_BLOCK, device=h.device, dtype=h.dtype))
        if sigma is None:
            phi = torch.ones_like(d).unsqueeze(2)
        else:
            phi = _fourier(n, sigma, h)[0][at]
            weight = weight * torch.exp(-0.5 * ((at[:, :, None] - at[:, None, :]) / sigma) ** 2).to(h.dtype)
        inside = ((h @ weight) * h).sum((0, 2))
        sums = h @ phi  # (blocks, M, F)
        later = sums.flip(0).cumsum(0).flip(0) - sums
        across = (((h * d[:, None, :]) @ phi) * later).sum((0, 2))
        return (inside + 2 * across).mean()


_constants: dict[tuple[object, ...], object] = {}


def _cached(make: Callable[[], Constant], like: Tensor, *key: object) -> Constant:
    """Kernels depend on (N, σ) alone and cost more than a step does: keep them, but only where the tensor is an ordinary one
    (not traced, not inside a functorch transform, not of inference mode, not in a CUDA graph's private memory)."""
    key = (*key, like.device, like.dtype)
    found = _constants.get(key)
    if found is not None:
        return found  # type: ignore[return-value]
    value = make()
    ordinary = type(like) in (Tensor, torch.nn.Parameter)  # not a fake tensor, nor another subclass
    ordinary = ordinary and not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
    if ordinary and not torch.is_inference_mode_enabled() and not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        if len(_constants) >= 64:
            _constants.clear()
        _constants[key] = value
    return value


def _gaussian(n: int, sigma: float, like: Tensor) -> Tensor:
    """K_ij = exp(−(i−j)²/2σ²) with a zero diagonal, (N, N)."""

    def make() -> Tensor:
        i = torch.arange(n, device=like.device, dtype=torch.float64)
        gap = i[:, None] - i[None, :]
        return (torch.exp(-0.5 * (gap / sigma) ** 2) * (gap != 0)).to(like.dtype)

    return _cached(make, like, "gaussian", n, sigma)


def _band(sigma: float, like: Tensor) -> Tensor:
    """K's nonzero diagonals, from −reach to reach, with a zero in the middle."""

    def make() -> Tensor:
        gap = torch.arange(-_reach(sigma), _reach(sigma) + 1, device=like.device, dtype=torch.float64)
        return (torch.exp(-0.5 * (gap / sigma) ** 2) * (gap != 0)).to(like.dtype)

    return _cached(make, like, "band", sigma)


def _fourier(n: int, sigma: float, like: Tensor) -> tuple[Tensor, float]:
    """Φ (N, F) with ΦΦᵀ = K to 1e-7, and the constant diagonal of ΦΦᵀ.

    On a period P the Gaussian is Σ_k c_k cos(2πk(i−j)/P), c_0 = σ√2π/P, c_k = 2c_0 exp(−2π²k²σ²/P²), up to its aliases at
    distance P − (N−1) and beyond; the cosine of a difference splits into products of cosines and of sines: F = 2k_max + 1.
    """
    period, top = _period(n, sigma), (_feature_count(n, sigma) - 1) // 2
    weights = [math.exp(-2 * (math.pi * sigma / period * k) ** 2) * (2 if k else 1) for k in range(top + 1)]
    weights = [sigma * math.sqrt(2 * math.pi) / period * w for w in weights]

    def make() -> Tensor:
        place = torch.arange(n, device=like.device, dtype=torch.float64)
        phase = place[:, None] * (2 * math.pi / period * torch.arange(top + 1, device=like.device, dtype=torch.float64))
        size = torch.tensor([math.sqrt(w) for w in weights], device=like.device, dtype=torch.float64)
        return torch.cat([phase.cos() * size, (phase.sin() * size)[:, 1:]], 1).to(like.dtype)

    return _cached(make, like, "fourier", n, sigma), sum(weights)


_LOG = math.sqrt(-2 * math.log(_TOLERANCE))  # exp(−x²/2) = tolerance


def _period(n: int, sigma: float) -> float:
    """The shortest period whose first alias, at distance P − (N−1), is below the tolerance."""
    return n - 1 + _LOG * sigma


def _feature_count(n: int, sigma: float) -> int:
    """1 + 2k, with k the first frequency whose weight exp(−2π²k²σ²/P²) is below the tolerance: 25 features at σ = N/6."""
    return 1 + 2 * math.ceil(_LOG * _period(n, sigma) / (2 * math.pi * sigma))


def _reach(sigma: float) -> int:
    return math.ceil(_LOG * sigma)


def _sigma(sigma: float | None, n: int) -> float:
    sigma = n / 6 if sigma is None else float(sigma)
    if not sigma > 0:
        raise ValueError(f"sigma is {sigma}; it must be positive (the paper uses N/6, the default)")
    return sigma


def _discounted(h: Tensor, alpha: Tensor, discount: str, absolute: bool) -> tuple[Tensor, Tensor]:
    """(M, N) samples and d = exp(−α), checked."""
    if discount not in ("product", "max"):
        raise ValueError(f"discount is {discount!r}; it must be 'product' (the paper) or 'max' (the authors' last release)")
    h = samples(h, absolute)
    if alpha.shape != h.shape[1:]:
        raise ValueError(f"alpha has shape {tuple(alpha.shape)}, but h has {h.shape[1]} neurons: alpha must be ({h.shape[1]},)")
    return h, torch.exp(-alpha.to(h.dtype))


def _exact(like: Tensor) -> torch.autocast:
    """Autocast would multiply in half precision; the penalty is small beside the loss and differences matter."""
    return torch.autocast(like.device.type, enabled=False)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _listed(weights: Tensor | Iterable[Tensor]) -> list[Tensor]:
    found = [weights] if isinstance(weights, Tensor) else list(weights)
    if not found:
        raise ValueError("no weights were given")
    return [_wide(w) for w in found]


def _total(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum()
