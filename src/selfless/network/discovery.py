"""Discovery: watch one forward pass to learn which activation follows which layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from selfless.network.layers import Tap
from selfless.network.roles import NORMS, WEIGHTED, feature_axis, first_tensor, is_activation

# Pointwise functions that count as an activation when they are applied to a layer's output.
_FUNCTIONS = {
    *(getattr(F, n) for n in "relu relu6 gelu silu elu selu celu leaky_relu softplus mish hardswish hardtanh hardsigmoid".split()),
    *(getattr(F, n) for n in "tanh sigmoid relu_ elu_ leaky_relu_ hardtanh_ softsign".split()),
    *(getattr(torch, n) for n in "relu relu_ tanh tanh_ sigmoid sigmoid_ clamp clamp_min selu celu".split()),
    *(getattr(Tensor, n) for n in "relu relu_ tanh tanh_ sigmoid sigmoid_ clamp clamp_ clamp_min".split()),
}


@dataclass
class Discovery:
    """Watches one forward pass and completes taps: which activation, a module or a function, follows which layer.

    Modules report their outputs; a function mode sees every activation applied to one of them. Normalisations and dropout in
    between are followed: for fc → norm → relu the pre-activation of `fc` is the output of the norm. `seen` holds what the pass
    itself gave: a layer's h, or its n (a copy, the activation may work in place) and the function to apply.
    """

    model: nn.Module
    seen: dict[str, tuple[Tensor, Callable[[Tensor], Tensor] | None]] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)
    _made: dict[int, tuple[Tensor, str]] = field(default_factory=dict)  # id of an output → (the output, module name)
    _behind: dict[str, str] = field(default_factory=dict)  # norm, dropout or activation → the module whose output it got
    _found: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = field(default_factory=dict)
    _calls: dict[nn.Module, int] = field(default_factory=dict)  # activation modules → how often they ran
    _handles: list[Any] = field(default_factory=list)
    _mode: TorchFunctionMode | None = None

    def start(self) -> None:
        for name, module in self.model.named_modules():
            if not any(True for _ in module.children()):
                self._handles.append(module.register_forward_hook(self._saw(name), with_kwargs=True))
        self._mode = _Watch(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()
        self._handles, self._mode, self._made = [], None, {}

    def _saw(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.reached.add(name)
            given = first_tensor(args, kwargs)
            origin = None if given is None else self._made.get(id(given))
            if origin is not None and isinstance(module, (*NORMS, nn.modules.dropout._DropoutNd)):
                self._behind[name] = origin[1]
            if origin is not None and is_activation(module) and isinstance(output, Tensor) and output.dim() == origin[0].dim():
                self._behind[name] = origin[1]
                self._calls[module] = self._calls.get(module, 0) + 1
                self._note(origin[1], module, (output, None))
            elif isinstance(output, Tensor):
                self._made[id(output)] = (output, name)

        return hook

    def applied(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An activation function is about to be called, on a module's output or on something else."""
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

        self._note(known[1], activation, (args[0].clone(), activation))

    def _note(self, tapped: str, activation: Callable[[Tensor], Tensor], seen: tuple[Tensor, Any]) -> None:
        """A module's call to its function comes first; the module itself, where there is one, then replaces it."""
        name: str | None = tapped
        while name is not None:
            if name not in self._found or isinstance(activation, nn.Module):
                self._found[name], self.seen[name] = (tapped, activation), seen
            name = self._behind.get(name)

    def complete(self, name: str, tap: Tap) -> Tap:
        """The tap with its activation and its weighted module, as far as the forward pass showed them."""
        tapped, activation = self._found.get(name, (None, None))
        if not tap.complete and tapped is not None:
            module = self.model.get_submodule(tapped)
            axis = tap.axis if feature_axis(module) is None else feature_axis(module)
            if isinstance(activation, nn.Module) and self._calls[activation] == 1:
                tap = replace(tap, module=activation, at_input=True, axis=axis)
            else:
                tap = replace(tap, module=module, activation=activation, axis=axis)
        before: str | None = name
        while tap.weighted is None and before is not None:
            module = self.model.get_submodule(before)
            tap = replace(tap, weighted=module) if isinstance(module, WEIGHTED) else tap
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
