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


def is_transposed_linear(module: nn.Module | None) -> bool:
    """Return True for the linear layer of GPT-2, `Conv1D` of Transformers, known by its form: weight (in, out), bias (out,), and `nf`."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if type(module).__name__ != "Conv1D" or not isinstance(weight, Tensor) or not isinstance(bias, Tensor):
        return False
    return weight.dim() == 2 and bias.shape == weight.shape[1:] and getattr(module, "nf", None) == len(bias)


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
    if isinstance(module, (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)) or is_transposed_linear(module):
        return -1
    return 1 if isinstance(module, (*WEIGHTED, *NORMS)) else None


def output_width(module: nn.Module | None) -> int | None:
    """Return how many neurons a linear layer or convolution has; None for any other module."""
    width = getattr(module, "out_features", getattr(module, "out_channels", None))
    return width if isinstance(width, int) else None


def registered_axis(model: nn.Module, name: str) -> int | None:
    """Return the neuron axis of the layer registered right before this activation: `self.act1` after `self.fc1` has the axis of fc1.

    None if the order does not tell: a block of activations, or one after the last layer, may belong to any layers before.
    """
    kinds = {other: feature_axis(m) or (0 if is_activation(m) else None) for other, m in model.named_modules()}  # 0: an activation
    known = [(other, kind) for other, kind in kinds.items() if kind is not None or other == name]
    place = [other for other, _ in known].index(name)
    before, after = known[place - 1 : place], known[place + 1 : place + 2]
    return before[0][1] if before and before[0][1] and after and after[0][1] else None


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first tensor among a module's arguments; None if there is none."""
    return next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)


def is_weighted(module: nn.Module | None) -> bool:
    """Return True for linear layers, also in the form of GPT-2, and for convolutions."""
    return isinstance(module, WEIGHTED) or is_transposed_linear(module)


def neuron_rows(module: Any) -> Tensor:
    """Return the weight of a layer with its neurons in the first axis."""
    weight: Tensor = module.weight
    return weight.T if is_transposed_linear(module) else weight


# ------------------------------------------------------------------------------------------------------------------- adapters
def adapted_layer(module: nn.Module) -> str | None:
    """Return the child that an adapter such as LoRA wraps: `base_layer` (PEFT), or a frozen linear layer beside two thin matrices."""
    if is_weighted(module._modules.get("base_layer")):
        return "base_layer"
    frozen = [n for n, m in module._modules.items() if isinstance(m, nn.Linear) and not any(p.requires_grad for p in m.parameters())]
    if len(frozen) != 1 or isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return None
    layer = module._modules[frozen[0]]
    assert isinstance(layer, nn.Linear)
    matrices = [p for n, p in module.named_parameters() if not within(n, frozen[0]) and p.dim() == 2]
    if len(matrices) != 2 or not all(p.requires_grad for p in matrices):
        return None
    (a, b), wide = (set(p.shape) for p in matrices), {layer.in_features, layer.out_features}
    thin = min(min(p.shape) for p in matrices)
    ends = {max(p.shape) for p in matrices}
    return frozen[0] if thin in a & b and thin < min(wide) and ends == wide else None


def adapters(model: nn.Module) -> dict[str, str]:
    """Return {the layer inside an adapter: the adapter}, by name."""
    found = {name: adapted_layer(module) for name, module in model.named_modules()}
    return {f"{name}.{child}" if name else child: name for name, child in found.items() if child is not None}


def uncounted(model: nn.Module) -> dict[str, str]:
    """Return the layers with weights that are no layers of their own, by name, each with the reason."""
    found: dict[str, str] = {}
    wrapped = adapters(model)
    copies = [n for n, m in model.named_modules() if {"original_module", "modules_to_save"} <= m._modules.keys()]
    for name, module in model.named_modules():
        adapter = next((a for inner, a in wrapped.items() if name != inner and within(name, a)), None)
        if not is_weighted(module):
            continue
        if isinstance(module, UNCALLED):
            found[name] = "attention reads its weights and never calls it"
        elif adapter is not None:
            found[name] = f"part of the adapter {adapter.rpartition('.')[2]!r}"
        elif any(within(name, f"{copy}.original_module" if copy else "original_module") for copy in copies):
            found[name] = "a frozen copy of a layer that is trained; it does not run"
    return found


# ------------------------------------------------------------------------------------------------------ layers of a whole model
def weighted_layers(model: nn.Module, kinds: Any = WEIGHTED) -> dict[str, nn.Module]:
    """Return the layers with weights, by name, in the order of registration. Conv1D counts as nn.Linear, an adapter as one layer."""
    left = uncounted(model)
    return {n: m for n, m in model.named_modules() if (isinstance(m, kinds) or is_transposed_linear(m)) and n not in left}


def output_layer(model: nn.Module) -> str:
    """Return the name of the output layer: the nn.Linear registered last, or the adapter around it; "" if there is none."""
    name = next(reversed(weighted_layers(model, nn.Linear)), "")
    return adapters(model).get(name, name)


def hidden_layers(model: nn.Module, heads: Iterable[str] = (), kinds: Any = WEIGHTED) -> dict[str, nn.Module]:
    """Return the layers with weights that are not heads: without `heads`, all but the one registered last.

    A model with an empty ModuleList or ModuleDict gets its heads later, so none of its layers is a head yet.
    """
    layers = weighted_layers(model, kinds)
    hidden = {name: m for name, m in layers.items() if not any(within(name, head) for head in heads)}
    wrapped = set(adapters(model).values())  # PEFT's adapters have empty containers of their own
    empty = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.ModuleDict) and len(m) == 0]
    has_no_head_yet = any(not any(within(name, adapter) for adapter in wrapped) for name in empty)
    if len(hidden) == len(layers) and not has_no_head_yet and hidden:
        hidden.popitem()
    return hidden


def nodes(model: nn.Module, heads: Iterable[str] = ()) -> dict[str, nn.Module]:
    """Return the linear layers and convolutions whose output neurons are hidden: without `heads`, all but the output layer."""
    heads = tuple(heads) or (output_layer(model),)
    plain = {name: m for name, m in weighted_layers(model, PLAIN).items() if isinstance(m, PLAIN)}
    return {name: m for name, m in plain.items() if not any(within(name, head) for head in heads)}


def layer_before(model: nn.Module, activation: str) -> str:
    """Return the name of the last linear layer or convolution registered before an activation module; "" if there is none."""
    last = ""
    for name, module in model.named_modules():
        if name == activation:
            break
        if isinstance(module, PLAIN):
            last = name
    return last
