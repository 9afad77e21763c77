"""The subspace that the inputs of a layer span, by energy: which directions of a weight old tasks use (Saha et al., ICLR 2021).

A layer computes W x. A change of W with ΔW x = 0 for the inputs x of old tasks changes nothing there. The inputs enter through their second
moment C = Σ x xᵀ (d, d). Its eigenvectors are the left singular vectors of the matrix whose columns are the inputs, its eigenvalues the
squared singular values. A basis M has orthonormal columns; further columns of zeros only fill it up to a fixed size.
"""

from __future__ import annotations

import torch
from torch import Tensor

RELATIVE = 1e-10  # a smaller share of the energy is rounding error, not a direction


def new_directions(basis: Tensor, moment: Tensor, energy: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return (V, s), V (d, d), s (d,): the directions to add to the basis M (d, r), and their singular values; zeros for the others.

    Ĉ = (I − MMᵀ) C (I − MMᵀ) = V diag(s²) Vᵀ,   k = the smallest with tr MᵀCM + s₁² + … + s_k² ≥ ε tr C,   ε = `energy`
    """
    m, c = basis.double(), moment.double()
    outside = torch.eye(len(c), dtype=c.dtype, device=c.device) - m @ m.mT
    rest = outside @ c @ outside
    values, vectors = torch.linalg.eigh((rest + rest.mT) / 2)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    total = c.diagonal().sum()
    before = total - values.sum() + values.cumsum(0) - values  # the energy without direction i and those after it
    is_taken = (before < energy * total) & (values > RELATIVE * total)
    return torch.where(is_taken, vectors, 0.0).to(basis.dtype), torch.where(is_taken, values.sqrt(), 0.0).to(basis.dtype)


def sizes_along(basis: Tensor, moment: Tensor) -> Tensor:
    """√diag(MᵀCM), (r,): the size of the inputs along each column of the basis M (d, r)."""
    m = basis.double()
    return ((moment.double() @ m) * m).sum(0).clamp(min=0).sqrt().to(basis.dtype)


def pack(basis: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns with a scale above 0 first, and at most d of them: (d, min(r, d)) and (min(r, d),)."""
    first = (scale <= 0).to(torch.int8).sort(stable=True).indices[: len(basis)]
    return basis.index_select(1, first), scale.index_select(0, first)


def along(step: Tensor, basis: Tensor, scale: Tensor) -> Tensor:
    """ΔW M diag(λ) Mᵀ: the part of a step (n, d, …) along the basis, each direction times its scale λ."""
    return (((step.flatten(1) @ basis) * scale) @ basis.mT).view(step.shape)
