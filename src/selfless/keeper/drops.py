"""Turn random nodes of hidden layers off in a training loop, for preservers with the capability `Drops`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfless.keeper.hook import Hook
from selfless.network.roles import nodes
from selfless.preserve.capabilities import Drops, State


class DroppedNodes:
    """Hooks that run hidden layers with the parameters of `drop_nodes`, in training mode with gradients on.

    The nodes are drawn once per step.
    """

    def __init__(self, model: nn.Module, term: Drops, heads: Sequence[str] = ()) -> None:
        self.term = term
        self.draw: Callable[[int], Tensor] = torch.rand
        self.share: Callable[[Tensor], Tensor] = lambda numbers: numbers  # makes random numbers the same on all ranks
        self._layers: dict[str, Any] = nodes(model, heads)
        self._state: State = {}
        self._off: dict[str, Tensor] = {}
        self._has_old: dict[str, bool] = {}  # by layer, for this state: False in the first task, in which nothing is drawn
        self._handles = [m.register_forward_hook(Hook(self._rerun(n)), prepend=True) for n, m in self._layers.items()]

    def follow(self, state: State) -> None:
        """Use this state from now on."""
        self._state, self._has_old = state, {}

    def end_step(self) -> None:
        """End a step: the next one draws new nodes."""
        self._off = {}

    def _off_nodes(self, name: str, device: torch.device) -> Tensor:
        """Return the mask of the nodes of a layer that are off in this step."""
        if not self._off:
            sizes = [m.weight.shape[0] for m in self._layers.values()]
            masks = (self.share(self.draw(sum(sizes)).to(device)) < self.term.drop_rate).split(sizes)
            self._off = dict(zip(self._layers, masks, strict=True))
        return self._off[name]

    def _rerun(self, name: str) -> Callable[..., Tensor | None]:
        """Return a forward hook that computes the output of a layer again, with the parameters of `drop_nodes`."""

        def hook(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if not self._state or not module.training or not torch.is_grad_enabled():
                return None
            live = {f"{name}.{key}": p for key, p in module.named_parameters(recurse=False)}
            if name not in self._has_old:
                none_off = torch.zeros(module.weight.shape[0], dtype=torch.bool, device=output.device)
                self._has_old[name] = f"{name}.weight" in self.term.drop_nodes(self._state, live, dict.fromkeys(live, none_off))
            if not self._has_old[name]:
                return None
            found = self.term.drop_nodes(self._state, live, dict.fromkeys(live, self._off_nodes(name, output.device).to(output.device)))
            weight, bias = found[f"{name}.weight"], found.get(f"{name}.bias", module.bias)
            if isinstance(module, nn.Linear):
                return F.linear(inputs[0], weight, bias)
            rerun: Tensor = module._conv_forward(inputs[0], weight, bias)
            return rerun

        return hook

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
