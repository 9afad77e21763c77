"""The step size of the implicit anchor, read from the optimizer: how far a constant gradient of 1 moves a parameter per iteration.

The explicit penalty adds G = 2λΩ(θ − θ*) to the gradient. After many iterations with a constant G, each one moves θ by

    SGD                          lr · G
    SGD with momentum μ          lr · (1 − dampening)/(1 − μ) · G        (Nesterov: the same)
    Adam, AdamW (also NAdam …)   lr / (√v̂ + ε) · G, per entry, with v̂ the second-moment estimate of the optimizer
    RMSprop, Adagrad             lr / (√v + ε) · G, per entry (RMSprop with momentum: divided by 1 − μ)
    any other                    lr · G, which is only a guess for optimizers that rescale steps differently (Rprop, Adadelta, Adamax)

The implicit anchor takes this step once per iteration. With Adam the explicit gradient would also increase v̂ and so weaken itself. The
implicit anchor does not enter v̂, so the two agree only as λ → 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def step_sizes(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """Return {parameter name: step size} for the parameters of the optimizer; a step size is a scalar or has the parameter's shape."""
    sizes = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in names:
                sizes[names[parameter]] = _step(group, optimizer.state.get(parameter, {}), parameter)
    return sizes


def _step(group: Mapping[str, Any], state: Mapping[str, Any], parameter: Tensor) -> Tensor:
    """Return the step size of one parameter, from its group and its state in the optimizer."""
    lr = torch.as_tensor(group["lr"], dtype=torch.float32, device=parameter.device)
    second = next((state[k] for k in ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum") if k in state), None)
    if second is not None and "betas" in group:
        steps = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)
        second = second / (1 - torch.as_tensor(group["betas"][1], dtype=torch.float32) ** steps)
    if second is not None and second.shape == parameter.shape:
        lr = lr / (second.float().sqrt() + group.get("eps", 1e-8))
    momentum = float(group.get("momentum") or 0.0)
    return lr * (1 - float(group.get("dampening") or 0.0)) / (1 - momentum) if momentum else lr
