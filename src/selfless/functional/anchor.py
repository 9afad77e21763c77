"""The quadratic anchor Σ_k Ω_k (θ_k − θ*_k)²: its value, and the implicit step that is stable at any strength.

Taken explicitly, the penalty's gradient 2λΩ(θ − θ*) makes SGD diverge once lr·λ·Ω is large. The implicit step, after the optimizer's own,
is the minimiser of cΩ(θ' − θ*)² + (θ' − θ)², c = 2 · step · λ:

    θ' = (θ + cΩθ*) / (1 + cΩ) = θ + share · (θ* − θ),    share = cΩ / (1 + cΩ).

It is stable for any λ and agrees with the explicit gradient to first order as cΩ → 0. `step` is how far a unit gradient, held for long,
moves a parameter per iteration (`selfless.keeper.anchor.step_sizes`). On a GPU the engine fuses the same share into its update kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_MOST = 1e30  # cΩ beyond this has share 1 in any precision; its quotient must stay finite


def anchor_value(theta: Tensor, omega: Tensor, star: Tensor) -> Tensor:
    """Σ_k Ω_k (θ_k − θ*_k)² of one parameter."""
    return (omega * (theta - star).square()).sum()


def anchor_share(omega: Tensor, c: Tensor) -> Tensor:
    """cΩ / (1 + cΩ): how far each entry moves towards θ*; exactly 1 where cΩ is huge."""
    pull = (c * omega).clamp(max=_MOST)
    return pull / (1 + pull)


@dataclass(frozen=True)
class Anchor:
    """Ω and θ* by parameter name; stacked members have a leading axis in both."""

    omega: Mapping[str, Tensor]
    star: Mapping[str, Tensor]

    def value(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Σ_k Ω_k (θ_k − θ*_k)² over the parameters that have both; 0 where none has."""
        terms = [anchor_value(parameters[n], omega, self.star[n]) for n, omega in self.omega.items() if n in parameters]
        return torch.stack(terms).sum() if terms else next(iter(parameters.values())).new_zeros(())

    def shares(self, step: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The share of every parameter that `step` names: step sizes times λ, 0-d, per entry, or (F, 1, …) for stacked members."""
        return {n: anchor_share(omega, 2 * step[n]) for n, omega in self.omega.items() if n in step}

    def moved(self, parameters: Mapping[str, Tensor], step: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """θ' after one implicit step, in the precision of θ*."""
        shares = self.shares({n: s for n, s in step.items() if n in parameters})
        return {n: torch.lerp(parameters[n].to(share.dtype), self.star[n], share) for n, share in shares.items()}
