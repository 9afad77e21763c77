"""Norms of groups of weights: the proximal step, which sets a group exactly to its centre (group sparsity, freezing)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def group_norm(parts: Sequence[Tensor]) -> Tensor:
    """‖θ_n‖ of every group n, (N,). Row n of every tensor (N, …) belongs to group n."""
    return torch.stack([part.square().flatten(1).sum(1) if part.dim() > 1 else part.square() for part in parts]).sum(0).sqrt()


def shrink_groups(parts: Sequence[Tensor], centres: Sequence[Tensor], amount: Tensor) -> list[Tensor]:
    """argmin_θ ½‖θ − θ'‖² + Σ_n t_n ‖θ_n − c_n‖  =  c_n + max(0, 1 − t_n/‖θ'_n − c_n‖) (θ'_n − c_n),  t = `amount` (N,).

    Row n of every tensor of `parts` (θ') and of `centres` (c) belongs to group n. A group that is nearer to its centre than t_n becomes
    the centre, exactly; at t_n = 0 nothing changes.
    """
    away = [part - centre for part, centre in zip(parts, centres, strict=True)]
    norm = group_norm(away)
    kept = torch.where(norm > amount, 1 - amount / torch.where(norm > 0, norm, 1.0), 0.0)
    rows = [kept.view(-1, *[1] * (part.dim() - 1)) for part in parts]
    return [
        torch.where(factor == 1, part, centre + factor * gap) for part, centre, gap, factor in zip(parts, centres, away, rows, strict=True)
    ]
