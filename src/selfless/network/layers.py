"""Layers by name, and taps: where a layer's pre-activation n and post-activation h are read.

A layer is named by its activation module (`act1`, an `nn.ReLU`) or by the module before it (`fc1`, an `nn.Linear`). The second way also
works where the activation is a function: `F.relu(self.fc1(x))`. A `Tap` says where n is and how to get h from it.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from selfless.network.roles import (
    NORMS,
    WEIGHTED,
    adapters,
    feature_axis,
    hidden_layers,
    is_activation,
    is_known_activation,
    is_weighted,
    registered_axis,
)

Layers = str | nn.Module | Iterable[str | nn.Module]


@dataclass(frozen=True)
class Tap:
    """The place of a layer's pre-activation n: the input of its activation module, or the output of the module before it."""

    module: nn.Module
    at_input: bool
    weighted: nn.Module | None = None  # the Linear or convolution that computes n, if known
    activation: Callable[[Tensor], Tensor] | None = None  # h = activation(n), for a tap at an output
    axis: int | None = None  # axis of the neurons: −1 after a Linear, 1 after a convolution; None: see `neuron_axis`

    @property
    def complete(self) -> bool:
        """True if h can be computed. A tap at an output needs the activation that follows."""
        return self.at_input or self.activation is not None

    @property
    def settled(self) -> bool:
        """True if the axis of the neurons is known too, so that a forward pass has nothing more to show."""
        return self.complete and self.axis is not None


def is_automatic(layers: Layers) -> bool:
    """Return True for "auto" and "all". Layers that do not run, or have no activation, are then left out instead of an error."""
    return isinstance(layers, str) and layers in ("auto", "all")


def resolve(model: nn.Module, layers: Layers, heads: Iterable[str] = ()) -> dict[str, Tap]:
    """Return the taps of `layers` (names, globs, modules, "auto" or "all"), in the order of the model.

    A tap whose activation only a forward pass can show is not complete yet. "auto" and "all" leave out the `heads`. Without `heads` they
    leave out the layer that was registered last, unless the heads are added later (the model has an empty ModuleList or ModuleDict).
    """
    modules, wrapped = dict(model.named_modules()), adapters(model)
    if is_automatic(layers):
        hidden = hidden_layers(model, heads, WEIGHTED if layers == "all" else nn.Linear)
        if not hidden:
            what = "nn.Linear or convolution" if layers == "all" else "nn.Linear"
            raise ValueError(
                f"layers={layers!r} found no hidden {what} in the model (the last one counts as the head, unless heads= names others). "
                "Pass the names of activation modules: layers=['act1', …]"
            )
        return {name: _tap_from_tree(model, name, modules[name], wrapped) for name in hidden}
    if not isinstance(layers, (str, nn.Module, Iterable)):
        raise TypeError(f"layers= takes names, globs, modules, 'auto' or 'all', not {layers!r}")
    wanted = [layers] if isinstance(layers, (str, nn.Module)) else list(layers)
    found = {name for item in wanted for name in _find_names(item, modules)}
    return {name: _tap_from_tree(model, name, modules[name], wrapped) for name in modules if name in found}


def _find_names(item: str | nn.Module, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the modules that one item of `layers=` stands for: a name, a glob or a module."""
    if isinstance(item, nn.Module):
        names = [name for name, module in modules.items() if module is item]
        if not names:
            raise ValueError(f"layers= contains a {type(item).__name__} that is not part of the model; pass one of the model's modules")
        return names[:1]
    if not isinstance(item, str):
        raise TypeError(f"layers= takes names, globs or modules, not {item!r}")
    if item in modules and item:
        return [item]
    names = []
    if any(c in item for c in "*?["):
        names = fnmatch.filter((n for n in modules if n), item)
        names = [n for n in names if is_activation(modules[n])] or [n for n in names if is_weighted(modules[n])]
    if not names:
        leaves = [n for n, m in modules.items() if n and not any(True for _ in m.children())]
        close = difflib.get_close_matches(item, leaves, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        shown = ", ".join(leaves[:12]) + (" …" if len(leaves) > 12 else "")
        raise ValueError(f"layer {item!r} is not in the model; its layers are {shown}.{hint}")
    return names


def _tap_from_tree(model: nn.Module, name: str, module: nn.Module, wrapped: Mapping[str, str]) -> Tap:
    """Return the tap as far as the module tree shows it: an activation module is its own tap; in nn.Sequential the next module is known.

    An activation module that is used in two places would mix two layers. Then the tap is the module before it.
    """
    if is_activation(module):
        before = _neighbour(model, name, -1)
        weighted = before if is_weighted(before) else None
        return Tap(module, at_input=True, weighted=weighted, axis=feature_axis(before) or registered_axis(model, name))
    weighted = module if is_weighted(module) else None
    place = wrapped.get(name, name)  # the activation follows the adapter, not the layer inside it
    output, axis = model.get_submodule(place), feature_axis(module)
    after = _neighbour(model, place, +1)
    if after is not None and is_known_activation(after):
        if _count_places(model, after) == 1:
            return Tap(after, at_input=True, weighted=weighted, axis=axis)
        if not any(isinstance(m, NORMS) for m in _modules_between(model, place, after)):
            return Tap(output, at_input=False, weighted=weighted, activation=after, axis=axis)
    return Tap(output, at_input=False, weighted=weighted, activation=_activation_of_torch_layer(model, place), axis=axis)


def _activation_of_torch_layer(model: nn.Module, name: str) -> Callable[[Tensor], Tensor] | None:
    """Return the activation after `linear1` of torch's transformer layers, which is a function; a compiled model does not show it."""
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    if child != "linear1" or type(parent) not in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        return None
    activation: Callable[[Tensor], Tensor] = parent.activation  # type: ignore[assignment]
    return activation


def _count_places(model: nn.Module, module: nn.Module) -> int:
    """Return how many times a module occurs in the module tree."""
    return sum(child is module for parent in model.modules() for child in parent._modules.values())


def _modules_between(model: nn.Module, name: str, after: nn.Module) -> list[nn.Module]:
    """Return the modules between the module `name` and a later module `after` of the same parent."""
    parent_name, _, child = name.rpartition(".")
    children = list(model.get_submodule(parent_name)._modules.items())
    start = [n for n, _ in children].index(child) + 1
    rest = [m for _, m in children[start:] if m is not None]
    return rest[: rest.index(after)]


def _neighbour(model: nn.Module, name: str, step: int) -> nn.Module | None:
    """Return the next (step=+1) or previous (step=−1) module of the same nn.Sequential, skipping normalisation and dropout."""
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    if not isinstance(parent, nn.Sequential):
        return None
    children = [(n, m) for n, m in parent._modules.items() if m is not None]  # a module used twice is listed twice
    position = [n for n, _ in children].index(child) + step
    while 0 <= position < len(children):
        module = children[position][1]
        if not isinstance(module, (*NORMS, nn.modules.dropout._DropoutNd)):
            return module
        position += step
    return None
