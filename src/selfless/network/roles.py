"""Roles of modules in any network: weighted layer, hidden layer, head, norm, activation. All other code takes them from here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # the first axis of their weight is their output neurons
WEIGHTED = (*PLAIN, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
UNCALLED = nn.modules.linear.NonDynamicallyQuantizableLinear  # attention's output projection: torch reads its weights, never calls it
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def is_activation(module: nn.Module) -> bool:
    """Return True for torch's activations and for custom modules without parameters and children."""
    if isinstance(module, (nn.MultiheadAttention, nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin)):
        return False  # attention, and functions that turn logits into probabilities
    home = type(module).__module__
    if home.startswith("torch.nn."):
        return home == "torch.nn.modules.activation"
    return not any(True for _ in module.children()) and not any(True for _ in module.parameters())


def is_known_activation(module: nn.Module) -> bool:
    """Return True for activation classes of torch and of this package. A custom module without parameters could also be a reshape."""
    return is_activation(module) and type(module).__module__.startswith(("torch.nn.", "selfless."))


def neuron_axis(n: Tensor, axis: int | None = None) -> int:
    """Return the axis of the neurons: that of the tap if it has one, else 1 for feature maps (M, C, H, W …) and −1 otherwise."""
    if n.dim() <= 2:
        return -1
    return axis if axis is not None else 1 if n.dim() >= 4 else -1


def within(name: str, module: str) -> bool:
    """Return True if `name` is the name of `module` or of something inside it."""
    return name == module or name.startswith(f"{module}.")


def feature_axis(module: nn.Module | None) -> int | None:
    """Return the axis of the neurons in a module's output; None if its class does not tell."""
    if isinstance(module, (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)):
        return -1
    return 1 if isinstance(module, (*WEIGHTED, *NORMS)) else None


def registered_axis(model: nn.Module, name: str) -> int | None:
    """Return the neuron axis of the last layer registered before this module: `self.act1` after `self.fc1` has the axis of fc1."""
    last: int | None = None
    for other, module in model.named_modules():
        if other == name:
            break
        last = feature_axis(module) or last
    return last


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first tensor among a module's arguments; None if there is none."""
    return next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)


# ------------------------------------------------------------------------------------------------------ layers of a whole model
def weighted_layers(model: nn.Module, kinds: Any = WEIGHTED) -> dict[str, nn.Module]:
    """Return the layers with weights, by name, in the order of registration."""
    return {name: m for name, m in model.named_modules() if isinstance(m, kinds) and not isinstance(m, UNCALLED)}


def output_layer(model: nn.Module) -> str:
    """Return the name of the output layer: the nn.Linear registered last; "" if there is none."""
    return next(reversed(weighted_layers(model, nn.Linear)), "")


def hidden_layers(model: nn.Module, heads: Iterable[str] = (), kinds: Any = WEIGHTED) -> dict[str, nn.Module]:
    """Return the layers with weights that are not heads: without `heads`, all but the one registered last.

    A model with an empty ModuleList or ModuleDict gets its heads later, so none of its layers is a head yet.
    """
    layers = weighted_layers(model, kinds)
    hidden = {name: m for name, m in layers.items() if not any(within(name, head) for head in heads)}
    has_no_head_yet = any(isinstance(m, nn.ModuleList | nn.ModuleDict) and len(m) == 0 for m in model.modules())
    if len(hidden) == len(layers) and not has_no_head_yet and hidden:
        hidden.popitem()
    return hidden


def nodes(model: nn.Module, heads: Iterable[str] = ()) -> dict[str, nn.Module]:
    """Return the linear layers and convolutions whose output neurons are hidden: without `heads`, all but the output layer."""
    heads = tuple(heads) or (output_layer(model),)
    return {name: m for name, m in weighted_layers(model, PLAIN).items() if not any(within(name, head) for head in heads)}


def layer_before(model: nn.Module, activation: str) -> str:
    """Return the name of the last linear layer or convolution registered before an activation module; "" if there is none."""
    last = ""
    for name, module in model.named_modules():
        if name == activation:
            break
        if isinstance(module, PLAIN):
            last = name
    return last
