"""Roles of modules in anybody's network: weighted layer, hidden layer, head, norm, activation. The one answer for every room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # whose first weight axis is their output neurons
WEIGHTED = (*PLAIN, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
UNCALLED = nn.modules.linear.NonDynamicallyQuantizableLinear  # attention's output projection: its weights are used, it is never called
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def is_activation(module: nn.Module) -> bool:
    """True for torch's activations and for custom modules without parameters and children."""
    if isinstance(module, (nn.MultiheadAttention, nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin)):
        return False  # attention, and what turns a head into probabilities
    home = type(module).__module__
    if home.startswith("torch.nn."):
        return home == "torch.nn.modules.activation"
    return not any(True for _ in module.children()) and not any(True for _ in module.parameters())


def is_known_activation(module: nn.Module) -> bool:
    """True for activation classes of torch and of this package. A custom bare module may be a reshape: only a forward pass shows."""
    return is_activation(module) and type(module).__module__.startswith(("torch.nn.", "selfless."))


def neuron_axis(n: Tensor, axis: int | None = None) -> int:
    """The axis that holds neurons: as the tap says, else 1 for feature maps (M, C, H, W …) and the last otherwise."""
    if n.dim() <= 2:
        return -1
    return axis if axis is not None else 1 if n.dim() >= 4 else -1


def within(name: str, module: str) -> bool:
    """True if `name` is the module's own name or that of something inside it."""
    return name == module or name.startswith(f"{module}.")


def feature_axis(module: nn.Module | None) -> int | None:
    """The axis of a module's output that holds its neurons; None if the module does not say."""
    if isinstance(module, (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)):
        return -1
    return 1 if isinstance(module, (*WEIGHTED, *NORMS)) else None


def registered_axis(model: nn.Module, name: str) -> int | None:
    """The neuron axis of the module registered last before this one: in `self.fc1, self.act1` the activation is fc1's."""
    last: int | None = None
    for other, module in model.named_modules():
        if other == name:
            break
        last = feature_axis(module) or last
    return last


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first tensor among a module's arguments."""
    return next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)


# ------------------------------------------------------------------------------------------------------ layers of a whole model
def weighted_layers(model: nn.Module, kinds: Any = WEIGHTED) -> dict[str, nn.Module]:
    """The layers with weights, by name, in the order they were registered."""
    return {name: m for name, m in model.named_modules() if isinstance(m, kinds) and not isinstance(m, UNCALLED)}


def output_layer(model: nn.Module) -> str:
    """The name of the output layer: the nn.Linear registered last; "" if there is none."""
    return next(reversed(weighted_layers(model, nn.Linear)), "")


def hidden_layers(model: nn.Module, heads: Iterable[str] = (), kinds: Any = WEIGHTED) -> dict[str, nn.Module]:
    """The layers with weights that are not heads: without `heads`, all but the one registered last.

    A model whose heads are still to come (an empty ModuleList or ModuleDict) has no head yet.
    """
    every = weighted_layers(model, kinds)
    hidden = {name: m for name, m in every.items() if not any(within(name, head) for head in heads)}
    coming = any(isinstance(m, nn.ModuleList | nn.ModuleDict) and len(m) == 0 for m in model.modules())
    if len(hidden) == len(every) and not coming and hidden:
        hidden.popitem()
    return hidden


def nodes(model: nn.Module, heads: Iterable[str] = ()) -> dict[str, nn.Module]:
    """Linear layers and convolutions whose output neurons are hidden: without `heads`, all but the output layer."""
    heads = tuple(heads) or (output_layer(model),)
    return {name: m for name, m in weighted_layers(model, PLAIN).items() if not any(within(name, head) for head in heads)}


def layer_before(model: nn.Module, activation: str) -> str:
    """The name of the linear layer or convolution registered last before an activation module; "" if there is none."""
    last = ""
    for name, module in model.named_modules():
        if name == activation:
            break
        if isinstance(module, PLAIN):
            last = name
    return last
