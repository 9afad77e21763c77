"""The strength "auto": λ from what its own term does in the first task, so that one setting serves every network.

    sparsifier   λ = ρ · r / R₁         R₁ = the largest R of the first task, as a moving average; λ = 0 until R has settled
                                        r = 1, 2, 4, … ≤ LARGEST: doubled at each look at which R > TARGET · R₁
    anchor       λ = ρ / Σ_k Ω_k θ*_k²  at the end of the first task

λR and λΣΩ(θ − θ*)² then have the unit of the task loss, for any width, number of layers, scale of activations and definition of Ω. After
the first task λ stays as it is, so the objective is a fixed function.

Why wait: without normalisation layers R hardly changes in the first steps, then grows a hundredfold in a few. λ = ρ/R of the first batch
would prevent that growth, and the network would learn nothing. R has settled once it grew by less than `GROWTH` between two looks, at
steps 32, 48, 72, … . If the first task ends earlier, it is trained without inhibition.

Why raise: the size of R does not say how firmly the loss holds the activations. Let the loss be L(s) ≈ L + ½ k log² s when the activations
are multiplied by s. R becomes s²R, and L + λs²R is least where 2λs²R = −k log s. A fall to s² = T needs λR = k log(1/T) / 4T, and k
differs from network to network. So λ starts small and is raised until R has fallen to T = TARGET. The looks are farther apart in
long tasks, because R follows λ with a delay. A loss that is still flat holds nothing: R then falls at once, and λ stays small.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

FIRST_LOOK, LATER, GROWTH, AVERAGE = 32.0, 1.5, 1.5, 0.1  # AVERAGE: the weight of the newest R in its moving average
TARGET, RAISE, LARGEST = 0.25, 2.0, 16.0

Scale = dict[str, Tensor]  # of one sparsifier, or of every member of a fleet: each tensor is () or (F,)


def start_scale(like: Tensor) -> Scale:
    """Return the scale before the first step, in the shape of `like`."""
    zero = torch.zeros_like(like, dtype=torch.float32)
    start = {name: zero.clone() for name in ("steps", "mean", "peak", "seen", "settled", "ended")}
    return start | {"look": zero + FIRST_LOOK, "raised": zero + 1.0}


def follow(scale: Mapping[str, Tensor], size: Tensor, target: Tensor | float = TARGET) -> Scale:
    """Return the scale after one more step of the first task, in which R was `size`."""
    size = size.detach().float()
    steps = scale["steps"] + 1
    mean = torch.where(steps == 1, size, torch.lerp(scale["mean"], size, AVERAGE))
    peak = torch.maximum(scale["peak"], mean)
    is_look = steps >= scale["look"]
    has_settled = is_look & (peak < GROWTH * scale["seen"])
    is_too_large = is_look & (scale["settled"] > 0) & (mean > target * peak)
    return {
        "steps": steps,
        "mean": mean,
        "peak": peak,
        "seen": torch.where(is_look, peak, scale["seen"]),
        "look": torch.where(is_look, scale["look"] * LATER, scale["look"]),
        "settled": torch.maximum(scale["settled"], has_settled.float()),
        "raised": torch.where(is_too_large, (scale["raised"] * RAISE).clamp(max=LARGEST), scale["raised"]),
        "ended": scale["ended"],
    }


def settle(scale: Mapping[str, Tensor]) -> Scale:
    """Return the scale at the end of the first task: settled, if there was a step."""
    return {**scale, "settled": (scale["peak"] > 0).float(), "ended": torch.ones_like(scale["ended"])}


def complete(saved: Mapping[str, Tensor]) -> Scale:
    """Return a saved scale with what older states lack. Their λ of a sparsifier was 0.1 / R₁, which is today's ρ with r = 2."""
    return {"raised": torch.full_like(saved["peak"], 2.0), **saved}


def scaled_strength(scale: Mapping[str, Tensor], share: float) -> Tensor:
    """λ = ρ · r / R₁; 0 until R has settled."""
    size = scale["peak"].clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(scale["settled"] > 0, share * scale["raised"] / size, 0.0)
