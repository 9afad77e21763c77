"""Which layers, and where their pre- and post-activations are.

A layer is named by its activation module (`act1`, an `nn.ReLU`) or by the module before it (`fc1`, an `nn.Linear`, also when the
activation is a function: `F.relu(self.fc1(x))`). A `Tap` says where the pre-activation n is and how to get h from it.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from selfless.network.roles import NORMS, WEIGHTED, feature_axis, hidden_layers, is_activation, is_known_activation, registered_axis

Layers = str | nn.Module | Iterable[str | nn.Module]


@dataclass(frozen=True)
class Tap:
    """Where a layer's pre-activation n is: at the input of its activation module, or at the output of the module before it."""

    module: nn.Module
    at_input: bool
    weighted: nn.Module | None = None  # the Linear or convolution behind it, where known
    activation: Callable[[Tensor], Tensor] | None = None  # h = activation(n), for a tap at an output
    axis: int | None = None  # of the neurons: −1 behind a Linear, 1 behind a convolution; None: by the number of axes

    @property
    def complete(self) -> bool:
        """Whether h can be had: a tap at an output needs to know the activation that follows."""
        return self.at_input or self.activation is not None


def is_automatic(layers: Layers) -> bool:
    """True for "auto" and "all": layers that a forward pass does not reach, or that have no activation, are then left out."""
    return isinstance(layers, str) and layers in ("auto", "all")


def resolve(model: nn.Module, layers: Layers, heads: Iterable[str] = ()) -> dict[str, Tap]:
    """Names, globs, modules, "auto" or "all" → taps, in the model's order. Activations that only a forward pass shows stay open.

    Left to itself it leaves out the `heads`; where none are named, the layer that was registered last, unless heads are still to come (an
    empty ModuleList or ModuleDict)."""
    modules = dict(model.named_modules())
    if is_automatic(layers):
        hidden = hidden_layers(model, heads, WEIGHTED if layers == "all" else nn.Linear)
        if not hidden:
            what = "nn.Linear or convolution" if layers == "all" else "nn.Linear"
            raise ValueError(
                f"layers={layers!r} found no hidden {what} in the model (the last one counts as the head, unless heads= names others); "
                "name the activation modules to act on"
            )
        return {name: _static(model, name, modules[name]) for name in hidden}
    if not isinstance(layers, (str, nn.Module, Iterable)):
        raise TypeError(f"layers= takes names, globs, modules, 'auto' or 'all', not {layers!r}")
    wanted = [layers] if isinstance(layers, (str, nn.Module)) else list(layers)
    found = {name for item in wanted for name in _named(item, modules)}
    return {name: _static(model, name, modules[name]) for name in modules if name in found}


def _named(item: str | nn.Module, modules: Mapping[str, nn.Module]) -> list[str]:
    if isinstance(item, nn.Module):
        names = [name for name, module in modules.items() if module is item]
        if not names:
            raise ValueError(f"the module {type(item).__name__} given as a layer is not part of the model")
        return names[:1]
    if not isinstance(item, str):
        raise TypeError(f"layers= takes names, globs or modules, not {item!r}")
    if item in modules and item:
        return [item]
    names = []
    if any(c in item for c in "*?["):
        names = fnmatch.filter((n for n in modules if n), item)
        names = [n for n in names if is_activation(modules[n])] or [n for n in names if isinstance(modules[n], WEIGHTED)]
    if not names:
        leaves = [n for n, m in modules.items() if n and not any(True for _ in m.children())]
        close = difflib.get_close_matches(item, leaves, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        shown = ", ".join(leaves[:12]) + (" …" if len(leaves) > 12 else "")
        raise ValueError(f"layer {item!r} is not in the model; its layers are {shown}.{hint}")
    return names


def _static(model: nn.Module, name: str, module: nn.Module) -> Tap:
    """What the module tree alone tells: an activation module taps itself; inside nn.Sequential, the next module is known.

    An activation module that stands in two places would mix two layers, so then the module before it is tapped instead.
    """
    if is_activation(module):
        before = _neighbour(model, name, -1)
        weighted = before if isinstance(before, WEIGHTED) else None
        return Tap(module, at_input=True, weighted=weighted, axis=feature_axis(before) or registered_axis(model, name))
    weighted = module if isinstance(module, WEIGHTED) else None
    after = _neighbour(model, name, +1)
    if after is not None and is_known_activation(after):
        if _places(model, after) == 1:
            return Tap(after, at_input=True, weighted=weighted, axis=feature_axis(module))
        if not any(isinstance(m, NORMS) for m in _between(model, name, after)):
            return Tap(module, at_input=False, weighted=weighted, activation=after, axis=feature_axis(module))
    return Tap(module, at_input=False, weighted=weighted, axis=feature_axis(module))


def _places(model: nn.Module, module: nn.Module) -> int:
    """In how many places of the module tree a module stands."""
    return sum(child is module for parent in model.modules() for child in parent._modules.values())


def _between(model: nn.Module, name: str, after: nn.Module) -> list[nn.Module]:
    parent_name, _, child = name.rpartition(".")
    children = list(model.get_submodule(parent_name)._modules.items())
    start = [n for n, _ in children].index(child) + 1
    rest = [m for _, m in children[start:] if m is not None]
    return rest[: rest.index(after)]


def _neighbour(model: nn.Module, name: str, step: int) -> nn.Module | None:
    """The next (or last) module of the same nn.Sequential, past normalisations and dropout."""
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    if not isinstance(parent, nn.Sequential):
        return None
    children = [(n, m) for n, m in parent._modules.items() if m is not None]  # a module that stands twice is listed twice
    place = [n for n, _ in children].index(child) + step
    while 0 <= place < len(children):
        module = children[place][1]
        if not isinstance(module, (*NORMS, nn.modules.dropout._DropoutNd)):
            return module
        place += step
    return None
