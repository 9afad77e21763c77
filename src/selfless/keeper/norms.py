"""Norms that a method cannot work with: those whose statistics or vectors follow the training, and those that divide by a pruned weight."""

from __future__ import annotations

from torch import nn

from selfless.preserve import Preserver
from selfless.preserve.capabilities import Freezes, Phased


def check_norms(term: Preserver, model: nn.Module) -> None:
    """Raise ValueError for a preserver that keeps old tasks exactly, if the network has running statistics or such a norm that trains."""
    if not isinstance(term, Freezes):
        return
    term.check_network(name for name, _ in model.named_buffers())
    name = type(term).__name__
    if layer := _trains_with(model, "_SpectralNorm", "SpectralNorm"):
        raise ValueError(
            f"{name} keeps old tasks exactly, but spectral_norm of {layer!r} changes with every batch of a new task; remove it, or freeze "
            "the layer"
        )
    if isinstance(term, Phased) and (layer := _trains_with(model, "_WeightNorm", "WeightNorm")):
        raise ValueError(f"{name} sets weights to 0, and weight_norm of {layer!r} divides by their norm; remove it, or freeze the layer")


def _trains_with(model: nn.Module, parametrization: str, hook: str) -> str:
    """Return the name of a layer that trains with this parametrization of torch, or with its older hook; "" if there is none."""
    for name, module in model.named_modules():
        listed = getattr(module, "parametrizations", None)
        kinds = {type(one).__name__ for one in listed.modules()} if isinstance(listed, nn.ModuleDict) else set()
        hooks = {type(one).__name__ for one in module._forward_pre_hooks.values()}
        if (parametrization in kinds or hook in hooks) and any(p.requires_grad for p in module.parameters()):
            return str(name)
    return ""
