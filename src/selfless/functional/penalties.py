"""The penalties R: on the activations h of a layer, and on weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from selfless.functional.gaussian import resolve_sigma
from selfless.functional.pairs import Discount, PairForm
from selfless.functional.shapes import samples, wide, without_autocast


def sni(h: Tensor, *, absolute: bool = False) -> Tensor:
    """Sparsity through neural inhibition:  R = 1/M Σ_{i≠j} Σ_m hᵢ hⱼ,  h: (M, N).

    Computed as mean_m [(Σᵢ hᵢ)² − Σᵢ hᵢ²].
    """
    h = samples(h, absolute)
    return PairForm(h.shape[1]).value(h)


def slni(h: Tensor, sigma: float | None = None, *, absolute: bool = False) -> Tensor:
    """Local inhibition:  R = 1/M Σ_{i≠j} exp(−(i−j)²/2σ²) Σ_m hᵢ hⱼ,  h: (M, N),  σ = N/6 unless given.

    Up to N = 128 it uses the N×N kernel K, above that Fourier features Φ (N, F) with ΦΦᵀ = K̂: R = 1/M (‖hΦ‖² − Σ K̂ᵢᵢ h²), O(M·N·F).
    """
    h = samples(h, absolute)
    return PairForm(h.shape[1], resolve_sigma(sigma, h.shape[1])).value(h)


def snid(h: Tensor, alpha: Tensor, discount: Discount = "product", *, absolute: bool = False) -> Tensor:
    """SNI with a discount:  R = 1/M Σ_{i≠j} D_ij Σ_m hᵢ hⱼ,  h: (M, N),  α: (N,).

    D_ij = exp(−(αᵢ+αⱼ)) for `discount="product"` (the paper), exp(−max(αᵢ, αⱼ)) for `"max"` (the released code). Pairs of
    neurons that are important for earlier tasks are penalised less.
    """
    h = samples(h, absolute)
    return PairForm(h.shape[1], None, alpha, discount).value(h)


def slnid(h: Tensor, alpha: Tensor, sigma: float | None = None, discount: Discount = "product", *, absolute: bool = False) -> Tensor:
    """SLNI with a discount:  R = 1/M Σ_{i≠j} D_ij exp(−(i−j)²/2σ²) Σ_m hᵢ hⱼ,  h: (M, N),  α: (N,),  σ = N/6 unless given.

    D as in `snid`. SLNID is the penalty that the paper proposes.
    """
    h = samples(h, absolute)
    return PairForm(h.shape[1], resolve_sigma(sigma, h.shape[1]), alpha, discount).value(h)


def l1_rep(h: Tensor) -> Tensor:
    """Sparse representation:  R = 1/M Σ_m Σᵢ |hᵢ|,  h: (M, N)."""
    return samples(h, absolute=True).sum(1).mean()


def decov(h: Tensor) -> Tensor:
    """DeCov (Cogswell et al., ICLR 2016):  R = ½ (‖C‖²_F − ‖diag C‖²),  C = 1/M Σ_m (h−h̄)(h−h̄)ᵀ,  h: (M, N).

    ‖C‖²_F also equals ‖XXᵀ‖²_F/M² for the centred X (M, N), so the smaller of the two Gram matrices is used.
    """
    x = samples(h)
    m, n = x.shape
    x = x - x.mean(0)
    with without_autocast(x):
        gram = x.T @ x if n <= m else x @ x.T
    return 0.5 * (gram.square().sum() - x.square().sum(0).square().sum()) / m**2


def sparing_decov(h: Tensor, form: PairForm) -> Tensor:
    """DeCov with weights:  R = ½ Σ_{i≠j} S_ij C_ij²,  S = K D of a pair form,  C = 1/M Σ_m (h−h̄)(h−h̄)ᵀ,  h: (M, N).

    K = 1 and D = 1 give DeCov. With D_ij = dᵢdⱼ and K = 1 it is DeCov of √d·h, so the smaller Gram matrix is used; otherwise C is built.
    """
    x = samples(h)
    if form.sigma is None and (form.alpha is None or form.discount == "product"):
        return decov(x if form.alpha is None else x * torch.exp(-0.5 * form.alpha.to(x.dtype)))
    x = x - x.mean(0)
    with without_autocast(x):
        c = x.T @ x / len(x)
    return 0.5 * (form.matrix(x) * c.square()).sum()


# ------------------------------------------------------------------------------------------------- penalties on weights
def l1_param(weights: Tensor | Iterable[Tensor]) -> Tensor:
    """R = Σ_k |θ_k| over one tensor or several."""
    return _total([w.abs().sum() for w in _as_list(weights)])


def l2_param(weights: Tensor | Iterable[Tensor]) -> Tensor:
    """R = Σ_k θ_k² over one tensor or several: weight decay. A strength of w/2 equals `weight_decay=w` of an optimizer."""
    return _total([w.square().sum() for w in _as_list(weights)])


def orth_reg(weight: Tensor, sharpness: float = 10.0) -> Tensor:
    """OrthReg (Rodríguez et al., ICLR 2017):  R = Σ_{i≠j} log(1 + exp(λ (cos(wᵢ, wⱼ) − 1))),  λ = 10,  w: (N, …).

    Row wᵢ holds the incoming weights of neuron i, of a linear layer or (flattened) of a convolution. Pairs with a positive cosine are
    pushed apart; pairs with a negative cosine are hardly changed. All N×N cosines are computed.
    """
    rows = F.normalize(wide(weight).flatten(1), dim=1)
    with without_autocast(rows):
        costs = F.softplus(sharpness * (rows @ rows.T - 1))
    return costs.sum() - costs.diagonal().sum()


def _as_list(weights: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return one tensor or several as a list, in at least float32."""
    tensors = [weights] if isinstance(weights, Tensor) else list(weights)
    if not tensors:
        raise ValueError("no weights were given; pass a tensor or a non-empty list of tensors")
    return [wide(w) for w in tensors]


def _total(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum()
