"""The local form of MAS: every layer's own output, its input held fixed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from selfless.network.calling import Forward, run_batch
from selfless.network.discovery import Discovery
from selfless.network.roles import NORMS, WEIGHTED


class Layerwise:
    """A forward of its own kind: (M, Σ_l N_l), what every linear layer and convolution gives after its activation, each with its input
    held fixed. The gradient of ‖·‖² is then each layer's own: MAS in its local form. The last layer's is what `forward` returns of it.
    """

    def __init__(self, forward: Forward | None = None) -> None:
        self.forward = forward

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        watch, given, handles = Discovery(model), dict[str, Tensor](), []
        for name, module in model.named_modules():
            if isinstance(module, WEIGHTED):
                handles.append(module.register_forward_pre_hook(lambda _m, args: tuple(_held(a) for a in args)))
                handles.append(module.register_forward_hook(lambda _m, _a, n, name=name: given.update({name: n})))
            elif any(p.requires_grad for p in module.parameters(recurse=False)) and not isinstance(module, NORMS):
                raise ValueError(
                    "the local form of MAS knows linear layers, convolutions and norms; "
                    f"{name or type(model).__name__!r} has parameters of its own: use MAS there"
                )
        watch.start()
        try:
            output = run_batch(model, batch, self.forward)
        finally:
            watch.stop()
            for handle in handles:
                handle.remove()
        parts = [output]
        for name, n in list(given.items())[:-1]:  # the last one is what `output` is of
            h, activation = watch.seen.get(name, (n, None))
            parts.append(h if activation is None else activation(h))
        return torch.cat([part.flatten(1) for part in parts], 1)


def _held(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
