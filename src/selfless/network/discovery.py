"""Discovery: watch one forward pass to find which activation follows which layer.

The module tree does not show it: `F.relu(self.fc1(x))` has no activation module, and modules run in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from selfless.network.layers import Tap
from selfless.network.roles import NORMS, adapted_layer, feature_axis, first_tensor, is_activation, is_weighted, neuron_axis

# Pointwise functions that count as an activation when they are applied to a layer's output.
_FUNCTIONS = {
    *(getattr(F, n) for n in "relu relu6 gelu silu elu selu celu leaky_relu softplus mish hardswish hardtanh hardsigmoid".split()),
    *(getattr(F, n) for n in "tanh sigmoid relu_ elu_ leaky_relu_ hardtanh_ softsign".split()),
    *(getattr(torch, n) for n in "relu relu_ tanh tanh_ sigmoid sigmoid_ clamp clamp_min selu celu".split()),
    *(getattr(Tensor, n) for n in "relu relu_ tanh tanh_ sigmoid sigmoid_ clamp clamp_ clamp_min".split()),
}


@dataclass
class Discovery:
    """Hooks on one forward pass that find the activation, a module or a function, after each layer, and complete taps with it.

    Forward hooks remember the output of every module. A function mode sees each activation function that is applied to such an output.
    Normalisation and dropout in between are allowed: for fc → norm → relu the pre-activation of `fc` is the output of the norm.

    seen      layer → (h, None), or (n, activation) where the activation is a function; n is a copy, as the function may work in place
    reached   the modules that ran
    """

    model: nn.Module
    seen: dict[str, tuple[Tensor, Callable[[Tensor], Tensor] | None]] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)
    _outputs: dict[int, tuple[Tensor, str]] = field(default_factory=dict)  # id of an output → (the output, name of its module)
    _sources: dict[str, str] = field(default_factory=dict)  # norm, dropout or activation → the module whose output it reads
    _found: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = field(default_factory=dict)  # layer → (module with n, activation)
    _calls: dict[nn.Module, int] = field(default_factory=dict)  # activation module → how often it ran
    _axes: dict[str, int] = field(default_factory=dict)  # module → the neuron axis of its output, by its number of axes
    _handles: list[Any] = field(default_factory=list)
    _mode: TorchFunctionMode | None = None

    def start(self) -> None:
        """Place the hooks. Call it right before the forward pass."""
        for name, module in self.model.named_modules():
            inner = adapted_layer(module)
            if inner is not None:
                self._sources[name] = f"{name}.{inner}" if name else inner  # n of the layer is the output of its adapter
            if inner is not None or not any(True for _ in module.children()):
                self._handles.append(module.register_forward_hook(self._hook(name), with_kwargs=True))
        self._mode = _FunctionWatch(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Remove the hooks; what was found stays."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()
        self._handles, self._mode, self._outputs = [], None, {}

    def _hook(self, name: str) -> Callable[..., None]:
        """Return a forward hook for the module `name`: it remembers the output, or notes the module as an activation."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.reached.add(name)
            if isinstance(output, Tensor):
                self._axes[name] = neuron_axis(output)
            x = first_tensor(args, kwargs)
            source = None if x is None else self._outputs.get(id(x))
            if source is not None and isinstance(module, (*NORMS, nn.modules.dropout._DropoutNd)):
                self._sources[name] = source[1]
            if source is not None and is_activation(module) and isinstance(output, Tensor) and output.dim() == source[0].dim():
                self._sources[name] = source[1]
                self._calls[module] = self._calls.get(module, 0) + 1
                self._note_activation(source[1], module, (output, None))
            elif isinstance(output, Tensor):
                self._outputs[id(output)] = (output, name)

        return hook

    def note_function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note an activation function that is about to be called, if its argument is the output of a module."""
        source = self._outputs.get(id(args[0])) if args else None
        if source is None:
            return
        name = function.__name__.rstrip("_")  # relu for relu_: the form that does not change its input
        out_of_place = getattr(F, name, None) or getattr(torch, name)
        options = {k: v for k, v in kwargs.items() if k != "inplace"}
        others = [a for a in args[1:] if not isinstance(a, bool)]

        def activation(n: Tensor) -> Tensor:
            result: Tensor = out_of_place(n, *others, **options)
            return result

        activation.__name__ = name
        self._note_activation(source[1], activation, (args[0].clone(), activation))

    def _note_activation(self, source: str, activation: Callable[[Tensor], Tensor], seen: tuple[Tensor, Any]) -> None:
        """Note the activation of the module `source` and of the layers before it, back to the weighted one.

        An activation module first calls its function, which is noted; the hook of the module then replaces it by the module.
        """
        name: str | None = source
        while name is not None:
            if name not in self._found or isinstance(activation, nn.Module):
                self._found[name], self.seen[name] = (source, activation), seen
            name = self._sources.get(name)

    def complete(self, name: str, tap: Tap) -> Tap:
        """Return the tap with its activation and its weighted module, as far as the forward pass showed them."""
        source, activation = self._found.get(name, (None, None))
        if not tap.complete and source is not None:
            module = self.model.get_submodule(source)
            axis = tap.axis if feature_axis(module) is None else feature_axis(module)
            if isinstance(activation, nn.Module) and self._calls[activation] == 1:
                tap = replace(tap, module=activation, at_input=True, axis=axis)
            else:
                tap = replace(tap, module=module, activation=activation, axis=axis)
        before: str | None = name
        while (tap.weighted is None or tap.axis is None) and before is not None:
            module = self.model.get_submodule(before)
            if tap.weighted is None and is_weighted(module):
                tap = replace(tap, weighted=module)
            if tap.axis is None:
                tap = replace(tap, axis=feature_axis(module))
            before = self._sources.get(before)
        return replace(tap, axis=self._axes.get(name)) if tap.axis is None else tap


class _FunctionWatch(TorchFunctionMode):
    """Reports every call of an activation function to a `Discovery`."""

    def __init__(self, discovery: Discovery) -> None:
        super().__init__()
        self.discovery = discovery

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FUNCTIONS:
            self.discovery.note_function(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
