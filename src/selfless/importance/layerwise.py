"""The forward pass of local MAS: the output of every layer, each with its input held fixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from selfless.network.calling import Forward, run_batch
from selfless.network.discovery import Discovery
from selfless.network.roles import NORMS, WEIGHTED


class Layerwise:
    """A forward pass that returns the outputs of all layers after their activations, (M, Σ_l N_l), with detached layer inputs.

    No gradient flows from one layer to another, so ∂‖·‖²/∂θ of a layer contains only the output of that layer: MAS in its local form. The
    output of the last layer is what `forward` returns.
    """

    def __init__(self, forward: Forward | None = None) -> None:
        self.forward = forward

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        watch, pre_activations, handles = Discovery(model), dict[str, Tensor](), list[Any]()
        for name, module in model.named_modules():
            if isinstance(module, WEIGHTED):
                handles.append(module.register_forward_pre_hook(lambda _m, args: tuple(_detach(a) for a in args)))
                handles.append(module.register_forward_hook(_note(pre_activations, name)))
            elif any(p.requires_grad for p in module.parameters(recurse=False)) and not isinstance(module, NORMS):
                raise ValueError(
                    "the local form of MAS supports linear layers, convolutions and norms; "
                    f"{name or type(model).__name__!r} has other parameters: use MAS there"
                )
        watch.start()
        try:
            output = run_batch(model, batch, self.forward)
        finally:
            watch.stop()
            for handle in handles:
                handle.remove()
        parts = [output]
        last = next((name for name, n in pre_activations.items() if n.data_ptr() == output.data_ptr()), None)
        last = next(reversed(pre_activations), None) if last is None else last  # else the output is computed from the last layer's
        for name, n in pre_activations.items():
            if name == last:  # that is `output`
                continue
            h, activation = watch.seen.get(name, (n, None))
            if len(h) != len(output):
                raise ValueError(
                    f"the local form of MAS supports layers with one row for each row of the output; {name!r} has {len(h)} for "
                    f"{len(output)}, as the nodes of graphs: use MAS there"
                )
            parts.append(h if activation is None else activation(h))
        return torch.cat([part.flatten(1) for part in parts], 1)


def _note(found: dict[str, Tensor], name: str) -> Callable[..., Tensor]:
    """Return a forward hook that stores n of a layer. n of a frozen layer is made a leaf, so that it too has a gradient, as α needs."""

    def hook(_module: nn.Module, _inputs: Any, n: Tensor) -> Tensor:
        if name in found:
            raise ValueError(f"the local form of MAS supports layers that run once in a forward pass; {name!r} runs again: use MAS there")
        found[name] = n if n.requires_grad else n.detach().requires_grad_()
        return found[name]

    return hook


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
