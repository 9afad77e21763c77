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

WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
UNCALLED = nn.modules.linear.NonDynamicallyQuantizableLinear  # attention's output projection: its weights are used, it is never called
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
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
    axis: int | None = None  # of the neurons: −1 behind a Linear, 1 behind a convolution; None: by the number of axes

    @property
    def complete(self) -> bool:
        """Whether h can be had: a tap at an output needs to know the activation that follows."""
        return self.at_input or self.activation is not None


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


def by_itself(layers: Layers) -> bool:
    """Whether nobody named them: what a forward pass does not reach, or has no activation, is then left out."""
    return isinstance(layers, str) and layers in ("auto", "all")


def within(name: str, module: str) -> bool:
    """Whether a name is a module's own or of something in it."""
    return name == module or name.startswith(f"{module}.")


def resolve(model: nn.Module, layers: Layers, heads: Iterable[str] = ()) -> dict[str, Tap]:
    """Names, globs, modules, "auto" or "all" → taps, in the model's order. Activations that only a forward pass shows stay open.

    Left to itself it leaves out the `heads`; where none are named, the layer that was registered last, unless heads are still to come (an
    empty ModuleList or ModuleDict)."""
    modules = dict(model.named_modules())
    if by_itself(layers):
        kinds = WEIGHTED if layers == "all" else nn.Linear
        weighted = [name for name, module in modules.items() if isinstance(module, kinds) and not isinstance(module, UNCALLED)]
        hidden = [name for name in weighted if not any(within(name, head) for head in heads)]
        coming = any(isinstance(m, nn.ModuleList | nn.ModuleDict) and len(m) == 0 for m in modules.values())
        hidden = hidden[:-1] if len(hidden) == len(weighted) and not coming else hidden
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
        return Tap(module, at_input=True, weighted=weighted, axis=_axis(before) or _registered_axis(model, name))
    weighted = module if isinstance(module, WEIGHTED) else None
    after = _neighbour(model, name, +1)
    if after is not None and _sure(after):
        if _places(model, after) == 1:
            return Tap(after, at_input=True, weighted=weighted, axis=_axis(module))
        if not any(isinstance(m, NORMS) for m in _between(model, name, after)):
            return Tap(module, at_input=False, weighted=weighted, activation=after, axis=_axis(module))
    return Tap(module, at_input=False, weighted=weighted, axis=_axis(module))


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


@dataclass(frozen=True)
class Wiring:
    """Which gated neurons stand at the two ends of every weight, for a chain of layers. Neurons are numbered through all gated layers;
    number `size` stands for the network's inputs and outputs, which have no gate."""

    size: int
    place: dict[str, Tensor]  # gated layer → the numbers of its neurons (N,)
    rows: dict[str, Tensor]  # parameter → the neuron that each of its rows (first axis) belongs to
    columns: dict[str, Tensor]  # weight → the neuron that each of its columns (second axis) reads


def chain(model: nn.Module, gated: Mapping[str, nn.Module]) -> Wiring:
    """The wiring of a chain: layers in the order they are defined in, each hidden one followed by its activation module in `gated`."""
    names = {module: name for name, module in gated.items()}
    device = next(model.parameters()).device
    place: dict[str, Tensor] = {}
    ends: list[tuple[str, nn.Module, str, str]] = []  # (name, layer, gate of its inputs, gate of its outputs)
    size, last = 0, ""
    for name, module in model.named_modules():
        if isinstance(module, WEIGHTED):
            if getattr(module, "groups", 1) != 1 or getattr(module, "transposed", False):
                raise ValueError(f"gates know plain linear layers and convolutions; {name!r} has groups or is transposed")
            ends.append((name, module, last, ""))
        elif module in names:
            if type(module).__module__ != "torch.nn.modules.activation" or isinstance(module, (nn.GLU, nn.Softmax)) or not ends:
                raise ValueError(f"gates stand behind a pointwise activation module of torch.nn; {name!r} is {type(module).__name__}")
            before, layer, source, _ = ends[-1]
            width = int(layer.weight.shape[0])  # type: ignore[index]
            last = names[module]
            place[last] = torch.arange(size, size + width, device=device)
            ends[-1] = (before, layer, source, last)
            size += width
        elif any(True for _ in module.parameters(recurse=False)):
            raise ValueError(f"gates know linear layers and convolutions; {name!r} ({type(module).__name__}) has parameters of its own")
    gates = [gate for *_, gate in ends]
    for k, (name, *_, gate) in enumerate(ends):
        if not gate and any(gates[k + 1 :]):
            raise ValueError(f"the hidden layer {name!r} has no gate: an activation module must follow it and be among the layers")
    if not place:
        raise ValueError("no hidden layer has an activation module to put gates behind; name them in layers=[…]")
    rows, columns = {}, {}
    for name, layer, source, gate in ends:
        weight: Any = layer.weight
        outside = torch.tensor([size], device=device)
        rows[f"{name}.weight"] = place[gate] if gate else outside.expand(weight.shape[0]).clone()
        if layer.bias is not None:
            rows[f"{name}.bias"] = rows[f"{name}.weight"]
        reads = place[source] if source else outside
        if weight.shape[1] % len(reads):
            raise ValueError(
                f"{name!r} reads {weight.shape[1]} numbers, not a multiple of the {len(reads)} gated neurons before it: no chain"
            )
        columns[f"{name}.weight"] = reads.repeat_interleave(weight.shape[1] // len(reads))
    return Wiring(size, place, rows, columns)


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What a module was called on, by position or by keyword."""
    return next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)


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
            axis = tap.axis if _axis(module) is None else _axis(module)
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
