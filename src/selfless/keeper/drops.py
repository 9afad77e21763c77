"""Drops: turn nodes off during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfless.keeper.hook import Hook
from selfless.network.roles import within
from selfless.preserve import State


class Drops:
    """Hooks that turn nodes of hidden layers off, towards θ_{k−1}: a layer is linear in its parameters, so with those of `dropped` it gives

        y_i of θ_{k−1} if node i is off, else (y_i − p y_i of θ_{k−1})/(1 − p)

    In training mode with gradients on; the nodes are drawn once a step. `skip` names layers that have no nodes, such as heads.
    """

    def __init__(self, model: nn.Module, rate: float, skip: Sequence[str] = ()) -> None:
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        found = {n: m for n, m in model.named_modules() if isinstance(m, kinds) and not any(within(n, s) for s in skip)}
        last = next((n for n, m in reversed(found.items()) if isinstance(m, nn.Linear)), "") if not skip else ""
        self.rate, self.draw = rate, torch.rand
        self._layers = {n: m for n, m in found.items() if n != last}
        self._anchor: Mapping[str, Tensor] = {}
        self._off: dict[str, Tensor] = {}
        self._handles = [m.register_forward_hook(Hook(self._turned(n)), prepend=True) for n, m in self._layers.items()]

    def follow(self, state: State) -> None:
        """θ_{k−1}."""
        self._anchor = state["anchor"]

    def renew(self) -> None:
        """The step is over."""
        self._off = {}

    def _nodes(self, name: str) -> Tensor:
        if not self._off:
            sizes = [m.weight.shape[0] for m in self._layers.values()]
            drawn = (self.draw(sum(sizes)) < self.rate).split(sizes)
            self._off = dict(zip(self._layers, drawn, strict=True))
        return self._off[name]

    def _turned(self, name: str) -> Callable[..., Tensor | None]:
        def hook(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if f"{name}.weight" not in self._anchor or not module.training or not torch.is_grad_enabled():
                return None
            weight = self._anchor[f"{name}.weight"].to(module.weight.dtype)
            bias = None if module.bias is None else self._anchor.get(f"{name}.bias", module.bias).to(module.bias.dtype)
            linear = isinstance(module, nn.Linear)
            before = F.linear(inputs[0], weight, bias) if linear else module._conv_forward(inputs[0], weight, bias)
            off = self._nodes(name).to(output.device).view(-1, *[1] * (0 if linear else module.weight.dim() - 2))
            return torch.where(off, before, (output - self.rate * before) / (1 - self.rate))

        return hook

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
