"""Adam and AdamW for all members of a fleet at once, as `torch.optim` has them.

    m ← β₁ m + (1 − β₁) g;   v ← β₂ v + (1 − β₂) g²;   θ ← θ − lr_f m̂ / (√v̂ + ε),   m̂ = m/(1 − β₁ᵗ), v̂ = v/(1 − β₂ᵗ)

β₁ is the run's `momentum`. AdamW first shrinks the parameters, θ ← (1 − lr_f w) θ; Adam adds w θ to the gradient g.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from selfless.engine.stack import column

BETA, EPSILON = 0.999, 1e-8  # β₂ and ε, the defaults of torch.optim


def adam_step(
    params: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], grads: Sequence[Tensor], lr: Tensor, t: Tensor, beta: float
) -> None:
    """Take step number t = 1, 2, … in place. `lr` is (F,), one rate per member; `beta` is β₁; `first` and `second` are m and v."""
    rate = lr / (-torch.expm1(t * math.log(beta)) if beta else 1.0)
    for p, m, v, g in zip(params, first, second, grads, strict=True):
        m.lerp_(g, 1 - beta)
        v.mul_(BETA).addcmul_(g, g, value=1 - BETA)
        p.sub_(column(rate, p) * m / _denominator(v, t))


def entry_rates(lr: Tensor, second: Tensor, t: Tensor) -> Tensor:
    """lr_f / (√v̂ + ε): how far a constant gradient of 1 moves an entry per step, for the implicit anchor (`selfless.keeper.anchor`)."""
    return column(lr, second) / _denominator(second, t)


def _denominator(v: Tensor, t: Tensor) -> Tensor:
    """√v̂ + ε."""
    return (v / -torch.expm1(t * math.log(BETA))).sqrt() + EPSILON
