"""The forward pass of local MAS: the output of every layer, each with its input held fixed."""

from __future__ import annotations

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
        watch, pre_activations, handles = Discovery(model), dict[str, Tensor](), []
        for name, module in model.named_modules():
            if isinstance(module, WEIGHTED):
                handles.append(module.register_forward_pre_hook(lambda _m, args: tuple(_detach(a) for a in args)))
                handles.append(module.register_forward_hook(lambda _m, _a, n, name=name: pre_activations.update({name: n})))
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
        for name, n in list(pre_activations.items())[:-1]:  # that of the last layer is `output`
            h, activation = watch.seen.get(name, (n, None))
            parts.append(h if activation is None else activation(h))
        return torch.cat([part.flatten(1) for part in parts], 1)


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
