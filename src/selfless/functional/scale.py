"""The strength "auto": λ from the size of its own term in the first task, so that one number ρ serves every network.

    sparsifier   λ = ρ / R₁             R₁ = the largest R of the first task, as a moving average; λ = 0 until R has settled
    anchor       λ = ρ / Σ_k Ω_k θ*_k²  at the end of the first task

λR and λΣΩ(θ − θ*)² then have the unit of the task loss, for any width, number of layers, scale of activations and definition of Ω. After
the first task λ stays as it is, so the objective is a fixed function.

Why wait: without normalisation layers R hardly changes in the first steps, then grows a hundredfold in a few. λ = ρ/R of the first batch
would prevent that growth, and the network would learn nothing. R has settled once it grew by less than `GROWTH` between two looks, at
steps 32, 48, 72, … . If the first task ends earlier, it is trained without inhibition.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

FIRST_LOOK, LATER, GROWTH, AVERAGE = 32.0, 1.5, 1.5, 0.1  # AVERAGE: the weight of the newest R in its moving average

Scale = dict[str, Tensor]  # of one sparsifier, or of every member of a fleet: each tensor is () or (F,)


def start_scale(like: Tensor) -> Scale:
    """Return the scale before the first step, in the shape of `like`."""
    zero = torch.zeros_like(like, dtype=torch.float32)
    return {name: zero.clone() for name in ("steps", "mean", "peak", "seen", "settled", "ended")} | {"look": zero + FIRST_LOOK}


def follow(scale: Mapping[str, Tensor], size: Tensor) -> Scale:
    """Return the scale after one more step of the first task, in which R was `size`."""
    size = size.detach().float()
    steps = scale["steps"] + 1
    mean = torch.where(steps == 1, size, torch.lerp(scale["mean"], size, AVERAGE))
    peak = torch.maximum(scale["peak"], mean)
    is_look = steps >= scale["look"]
    has_settled = is_look & (peak < GROWTH * scale["seen"])
    return {
        "steps": steps,
        "mean": mean,
        "peak": peak,
        "seen": torch.where(is_look, peak, scale["seen"]),
        "look": torch.where(is_look, scale["look"] * LATER, scale["look"]),
        "settled": torch.maximum(scale["settled"], has_settled.float()),
        "ended": scale["ended"],
    }


def settle(scale: Mapping[str, Tensor]) -> Scale:
    """Return the scale at the end of the first task: settled, if there was a step."""
    return {**scale, "settled": (scale["peak"] > 0).float(), "ended": torch.ones_like(scale["ended"])}


def scaled_strength(scale: Mapping[str, Tensor], share: float) -> Tensor:
    """λ = ρ / R₁; 0 until R has settled."""
    return torch.where(scale["settled"] > 0, share / scale["peak"].clamp(min=torch.finfo(torch.float32).tiny), 0.0)
