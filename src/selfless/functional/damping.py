"""A strength that is stable in any optimizer step, for a penalty D ≥ 0 that is 0 at its goal: distillation, which is 0 at the teacher.

Write D = ½ r². Along its gradient, D has the curvature κ = ‖∇r‖² = ‖∇D‖²/(2D). A step that is implicit in the linear model of r,

    Δ = argmin λ/2 (r + ∇r·Δ)² + ‖Δ‖²/(2 step) = −step · λ' ∇D,    λ' = λ / (1 + step λ κ),

never passes the goal: step λ' κ < 1 for any λ, and λ' → λ as step λ κ → 0. So a large λ, long features, many old heads or a large learning
rate make the step shorter, where the plain gradient λ∇D would diverge. `step` is how far a constant gradient of 1 moves a parameter per
iteration: lr/(1 − μ) for SGD with momentum μ, as for the implicit anchor. An optimizer with momentum also repeats earlier steps, so κ is
the largest of the recent measurements: κ ← max(‖∇D‖²/(2D), 0.9 κ).
"""

from __future__ import annotations

import torch
from torch import Tensor

KEEP = 0.9  # the share of an earlier κ that counts at the next measurement
SMALLEST = 1e-8  # a smaller D is rounding error; the step is tiny there for any λ
EVERY = 5  # κ is measured in the first steps of a task (or after its warm-up) and then once in so many steps


def measures_curvature(step: int) -> bool:
    """Return True if κ is measured in this step of a task or phase, counted from 0. In a warm-up D is 0, so its κ says nothing."""
    return step < EVERY or step % EVERY == 0


def largest_curvature(last: Tensor, value: Tensor, square: Tensor) -> Tensor:
    """max(‖∇D‖²/(2D), 0.9 κ) for the last κ, the value D and `square`, ‖∇D‖². A κ that is not finite is left out."""
    now = square / (2 * value.clamp(min=SMALLEST))
    return torch.maximum(torch.where(torch.isfinite(now), now, 0.0).to(last.dtype), KEEP * last)


def damping(step_lambda: Tensor, curvature: Tensor) -> Tensor:
    """λ'/λ = 1/(1 + step λ κ); `step_lambda` is step λ."""
    return 1 / (1 + step_lambda * curvature)
