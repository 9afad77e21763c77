"""Step sizes for damped distillation: how far each parameter moves in a step, by all optimizers that train the model."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

References = Sequence["weakref.ref[torch.optim.Optimizer]"]


def with_latest(known: References, optimizer: torch.optim.Optimizer) -> References:
    """Return the optimizers that are still there, the one that took the latest step at the end."""
    if known and known[-1]() is optimizer:
        return known
    return [*(one for one in known if one() is not None and one() is not optimizer), weakref.ref(optimizer)]


def nominal_steps(optimizers: References, parameters: Mapping[str, Tensor]) -> tuple[float | None, dict[str, float]]:
    """Return the largest step lr/(1 − μ), with μ the momentum or Adam's β₁, and each parameter's step as a share of it.

    A parameter of several optimizers has the step of the latest one; one of none is taken to have the largest. None without optimizers.
    """
    names, steps = {id(p): name for name, p in parameters.items()}, dict[str, float]()
    for optimizer in (found for one in optimizers if (found := one()) is not None):
        for group in optimizer.param_groups:
            momentum = group.get("momentum") or group.get("betas", (0.0,))[0]
            step = float(group["lr"]) / (1 - float(momentum))
            steps |= {names[id(p)]: step for p in group["params"] if id(p) in names}
    largest = max(steps.values(), default=None)
    return largest, {name: step / largest for name, step in steps.items()} if largest else {}


def largest_rate(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> float | Tensor:
    """Return the largest learning rate of the groups that have parameters of the model: with some frozen the others still learn."""
    rates = [group["lr"] for group in optimizer.param_groups if any(p in names for p in group["params"])]
    tensors = [rate for rate in rates if isinstance(rate, Tensor)]
    if not tensors:
        return max(map(float, rates))
    return torch.stack([torch.as_tensor(rate, dtype=torch.float32, device=tensors[0].device) for rate in rates]).max()
