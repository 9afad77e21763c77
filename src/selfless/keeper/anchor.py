"""How far a unit gradient moves a parameter: the step size of the implicit anchor, read from the optimizer.

The explicit penalty adds G = 2λΩ(θ − θ*) to the gradient. Held for long, a constant G moves θ per iteration by

    SGD                          lr · G
    SGD with momentum μ          lr · (1 − dampening)/(1 − μ) · G        (Nesterov: the same)
    Adam, AdamW (also NAdam …)   lr / (√v̂ + ε) · G, per entry, v̂ the optimizer's own second-moment estimate
    RMSprop, Adagrad             lr / (√v + ε) · G, likewise (RMSprop with momentum: over 1 − μ)
    any other                    lr · G, which is only a guess for optimizers that rescale steps in their own way (Rprop, Adadelta, Adamax)

so that is the step the implicit anchor takes, once per iteration. With Adam the explicit gradient would also enter v̂ and there weaken
itself; the implicit one does not, which is why the two agree only as λ → 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def step_sizes(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """{parameter name: step size}, 0-d or of the parameter's shape, for the parameters that the optimizer holds."""
    sizes = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in names:
                sizes[names[parameter]] = _step(group, optimizer.state.get(parameter, {}), parameter)
    return sizes


def _step(group: Mapping[str, Any], state: Mapping[str, Any], parameter: Tensor) -> Tensor:
    lr = torch.as_tensor(group["lr"], dtype=torch.float32, device=parameter.device)
    second = next((state[k] for k in ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum") if k in state), None)
    if second is not None and "betas" in group:
        steps = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)
        second = second / (1 - torch.as_tensor(group["betas"][1], dtype=torch.float32) ** steps)
    if second is not None and second.shape == parameter.shape:
        lr = lr / (second.float().sqrt() + group.get("eps", 1e-8))
    momentum = float(group.get("momentum") or 0.0)
    return lr * (1 - float(group.get("dampening") or 0.0)) / (1 - momentum) if momentum else lr
