"""Which layers, and where their pre- and post-activations are.

A layer is named by its activation module (`act1`, an `nn.ReLU`) or by the module before it (`fc1`, an `nn.Linear`, also when the
activation is a function: `F.relu(self.fc1(x))`). A `Tap` says where the pre-activation n is and how to get h from it.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Layers = str | nn.Module | Iterable[str | nn.Module]

_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_PASSIVE = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
_POOLS = (
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
)
# Pointwise functions that count as an activation when they are applied to a layer's output.
_FUNCTIONS = {
    *(getattr(F, n) for n in "relu relu6 gelu silu elu selu celu leaky_relu softplus mish hardswish hardtanh hardsigmoid".split()),
    *(getattr(F, n) for n in "tanh sigmoid relu_ elu_ leaky_relu_ hardtanh_ softsign".split()),
    *(getattr(torch, n) for n in "relu relu_ tanh tanh_ sigmoid sigmoid_ clamp clamp_min selu celu".split()),
    *(getattr(Tensor, n) for n in "relu relu_ tanh tanh_ sigmoid sigmoid_ clamp clamp_ clamp_min".split()),
}


@dataclass(frozen=True)
class Tap:
    """Where a layer's pre-activation n is: at the input of its activation module, or at the output of the module before it."""

    module: nn.Module
    at_input: bool
    weighted: nn.Module | None = None  # the Linear or convolution behind it, where known
    activation: Callable[[Tensor], Tensor] | None = None  # h = activation(n), for a tap at an output

    @property
    def complete(self) -> bool:
        """Whether h can be had: a tap at an output needs to know the activation that follows."""
        return self.at_input or self.activation is not None


def is_activation(module: nn.Module) -> bool:
    """An activation: one of torch's, or any parameterless module that is none of the usual other things."""
    if isinstance(module, (nn.MultiheadAttention, nn.Softmax, nn.LogSoftmax, nn.Softmin)):
        return False  # attention, and what turns a head into probabilities
    if type(module).__module__ == "torch.nn.modules.activation":
        return True
    bare = not any(True for _ in module.children()) and not any(True for _ in module.parameters())
    return bare and not isinstance(module, (*_WEIGHTED, *_NORMS, *_PASSIVE, *_POOLS)) and type(module) is not nn.Module


def neuron_axis(n: Tensor, module: nn.Module | None = None) -> int:
    """The axis that holds neurons: 1 for feature maps, the last otherwise. (M, ?, ?) is (M, T, N) unless a convolution made it."""
    if n.dim() >= 4:
        return 1
    made_by_conv = isinstance(module, (nn.Conv1d, nn.BatchNorm1d)) or type(n.grad_fn).__name__.startswith(
        ("Convolution", "NativeBatchNorm")
    )
    return 1 if n.dim() == 3 and made_by_conv else -1


def resolve(model: nn.Module, layers: Layers) -> dict[str, Tap]:
    """Names, globs, modules or "auto" → taps, in the model's order. Activations that only a forward pass shows stay open."""
    modules = dict(model.named_modules())
    if isinstance(layers, str) and layers == "auto":
        hidden = [name for name, module in modules.items() if isinstance(module, nn.Linear)][:-1]  # the last one is a head
        if not hidden:
            raise ValueError("layers='auto' found no hidden nn.Linear in the model; name the activation modules to act on")
        return {name: _static(model, name, modules[name]) for name in hidden}
    wanted = [layers] if isinstance(layers, (str, nn.Module)) else list(layers)
    found = {name for item in wanted for name in _named(item, modules)}
    return {name: _static(model, name, modules[name]) for name in modules if name in found}


def _named(item: str | nn.Module, modules: Mapping[str, nn.Module]) -> list[str]:
    if isinstance(item, nn.Module):
        names = [name for name, module in modules.items() if module is item]
        if not names:
            raise ValueError(f"the module {type(item).__name__} given as a layer is not part of the model")
        return names[:1]
    if item in modules and item:
        return [item]
    names = fnmatch.filter((n for n in modules if n), item) if any(c in item for c in "*?[") else []
    if any(c in item for c in "*?["):
        names = [n for n in names if is_activation(modules[n])] or [n for n in names if isinstance(modules[n], _WEIGHTED)]
    if not names:
        leaves = [n for n, m in modules.items() if n and not any(True for _ in m.children())]
        close = difflib.get_close_matches(item, leaves, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        shown = ", ".join(leaves[:12]) + (" …" if len(leaves) > 12 else "")
        raise ValueError(f"layer {item!r} is not in the model; its layers are {shown}.{hint}")
    return names


def _static(model: nn.Module, name: str, module: nn.Module) -> Tap:
    """What the module tree alone tells: an activation module taps itself; inside nn.Sequential, the next module is known."""
    if is_activation(module):
        before = _neighbour(model, name, -1)
        return Tap(module, at_input=True, weighted=before if isinstance(before, _WEIGHTED) else None)
    weighted = module if isinstance(module, _WEIGHTED) else None
    after = _neighbour(model, name, +1)
    if after is not None and is_activation(after):
        return Tap(after, at_input=True, weighted=weighted)
    return Tap(module, at_input=False, weighted=weighted)


def _neighbour(model: nn.Module, name: str, step: int) -> nn.Module | None:
    """The next (or last) module of the same nn.Sequential, past normalisations and dropout."""
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    if not isinstance(parent, nn.Sequential):
        return None
    names = list(dict(parent.named_children()))
    place = names.index(child) + step
    while 0 <= place < len(names):
        module = parent.get_submodule(names[place])
        if not isinstance(module, (*_NORMS, nn.modules.dropout._DropoutNd)):
            return module
        place += step
    return None


@dataclass
class Discovery:
    """Watches one forward pass and completes taps: which activation, a module or a function, follows which layer.

    Modules report their outputs; a function mode sees every activation applied to one of them. Normalisations and dropout in
    between are followed: for fc → norm → relu the pre-activation of `fc` is the output of the norm.
    """

    model: nn.Module
    _made: dict[int, tuple[Tensor, str]] = field(default_factory=dict)  # id of an output → (the output, module name)
    _behind: dict[str, str] = field(default_factory=dict)  # norm or dropout → the module whose output it got
    _found: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = field(default_factory=dict)
    seen: dict[str, Tensor] = field(default_factory=dict)  # module → h, as this pass gave it
    _handles: list[Any] = field(default_factory=list)
    _mode: TorchFunctionMode | None = None

    def start(self) -> None:
        for name, module in self.model.named_modules():
            if not any(True for _ in module.children()):
                self._handles.append(module.register_forward_hook(self._saw(name)))
        self._mode = _Watch(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()
        self._handles, self._mode, self._made = [], None, {}

    def _saw(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            origin = self._made.get(id(inputs[0])) if inputs else None
            if origin is not None and isinstance(module, (*_NORMS, nn.modules.dropout._DropoutNd)):
                self._behind[name] = origin[1]
            if origin is not None and is_activation(module):
                self._behind[name] = origin[1]
                self._note(origin[1], module, output)
            elif isinstance(output, Tensor):
                self._made[id(output)] = (output, name)

        return hook

    def applied(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An activation function was called, on a module's output or on something else."""
        known = self._made.get(id(args[0])) if args else None
        if known is None:
            return
        name = function.__name__.rstrip("_")  # the form that leaves its input alone
        plain = getattr(F, name, None) or getattr(torch, name)
        options = {k: v for k, v in kwargs.items() if k != "inplace"}
        others = [a for a in args[1:] if not isinstance(a, bool)]

        def activation(n: Tensor) -> Tensor:
            result: Tensor = plain(n, *others, **options)
            return result

        self._note(known[1], activation, activation(args[0]))

    def _note(self, tapped: str, activation: Callable[[Tensor], Tensor], h: Tensor) -> None:
        name: str | None = tapped
        while name is not None and name not in self._found:
            self._found[name], self.seen[name] = (tapped, activation), h
            name = self._behind.get(name)

    def complete(self, name: str, tap: Tap) -> Tap:
        """The tap with its activation and its weighted module, as far as the forward pass showed them."""
        tapped, activation = self._found.get(name, (None, None))
        if not tap.complete and tapped is not None:
            tap = replace(tap, module=self.model.get_submodule(tapped), activation=activation)
        before: str | None = name
        while tap.weighted is None and before is not None:
            module = self.model.get_submodule(before)
            tap = replace(tap, weighted=module) if isinstance(module, _WEIGHTED) else tap
            before = self._behind.get(before)
        return tap


class _Watch(TorchFunctionMode):
    def __init__(self, discovery: Discovery) -> None:
        super().__init__()
        self.discovery = discovery

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FUNCTIONS:
            self.discovery.applied(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
