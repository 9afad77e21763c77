"""Roles of a module in somebody's network: weighted layer, norm, activation, head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


UNCALLED = nn.modules.linear.NonDynamicallyQuantizableLinear  # attention's output projection: its weights are used, it is never called


NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def is_activation(module: nn.Module) -> bool:
    """An activation: one of torch's, or a bare module (no parameters, no children) that is not torch's own."""
    if isinstance(module, (nn.MultiheadAttention, nn.Softmax, nn.LogSoftmax, nn.Softmin)):
        return False  # attention, and what turns a head into probabilities
    home = type(module).__module__
    if home.startswith("torch.nn."):
        return home == "torch.nn.modules.activation"
    return not any(True for _ in module.children()) and not any(True for _ in module.parameters())


def _sure(module: nn.Module) -> bool:
    """An activation by its class; a bare module of somebody's own may as well be a reshape, which a forward pass will show."""
    return is_activation(module) and type(module).__module__.startswith(("torch.nn.", "selfless."))


def neuron_axis(n: Tensor, axis: int | None = None) -> int:
    """The axis that holds neurons: as the tap says, else 1 for feature maps (M, C, H, W …) and the last otherwise."""
    if n.dim() <= 2:
        return -1
    return axis if axis is not None else 1 if n.dim() >= 4 else -1


def within(name: str, module: str) -> bool:
    """Whether a name is a module's own or of something in it."""
    return name == module or name.startswith(f"{module}.")


def _axis(module: nn.Module | None) -> int | None:
    if isinstance(module, (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)):
        return -1
    return 1 if isinstance(module, (*WEIGHTED, *NORMS)) else None


def _registered_axis(model: nn.Module, name: str) -> int | None:
    """The axis of the module registered last before this one: what most people's `self.fc1, self.act1` means."""
    last: int | None = None
    for other, module in model.named_modules():
        if other == name:
            break
        last = _axis(module) or last
    return last


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What a module was called on, by position or by keyword."""
    return next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
