"""The quadratic anchor Σ_k Ω_k (θ_k − θ*_k)²: its value, and the implicit step that is stable at any strength.

With the explicit gradient of the penalty, 2λΩ(θ − θ*), SGD diverges once lr·λ·Ω is large. The implicit step follows the step of the
optimizer. It is the minimum of cΩ(θ' − θ*)² + (θ' − θ)² over θ', with c = 2 · step · λ:

    θ' = (θ + cΩθ*) / (1 + cΩ) = θ + share · (θ* − θ),    share = cΩ / (1 + cΩ).

It is stable for any λ and agrees with the explicit gradient to first order as cΩ → 0. `step` is how far a constant gradient of 1 moves a
parameter per iteration (`selfless.keeper.anchor.step_sizes`). On a GPU the update kernel of the engine computes the same share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 1e30  # above this cΩ the share is 1 in any precision; a larger one could give inf / inf


def anchor_value(theta: Tensor, omega: Tensor, star: Tensor) -> Tensor:
    """Σ_k Ω_k (θ_k − θ*_k)² of one parameter."""
    return (omega * (theta - star).square()).sum()


def anchor_share(omega: Tensor, c: Tensor) -> Tensor:
    """cΩ / (1 + cΩ): the share of the way to θ* that each entry moves; exactly 1 where cΩ is very large."""
    pull = (c * omega).clamp(max=LARGEST)
    return pull / (1 + pull)


@dataclass(frozen=True)
class Anchor:
    """Ω and θ* by parameter name. For stacked members both have a leading axis."""

    omega: Mapping[str, Tensor]
    star: Mapping[str, Tensor]

    def value(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Σ_k Ω_k (θ_k − θ*_k)² over the parameters that have an Ω; 0 if none has."""
        terms = [anchor_value(parameters[n], omega, self.star[n]) for n, omega in self.omega.items() if n in parameters]
        return torch.stack(terms).sum() if terms else next(iter(parameters.values())).new_zeros(())

    def shares(self, step: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the share of every parameter in `step`. A value of `step` is step size · λ: a scalar, per entry, or (F, 1, …)."""
        return {n: anchor_share(omega, 2 * step[n]) for n, omega in self.omega.items() if n in step}
