"""What the forward passes of a training step gave: the post-activations of the chosen layers, as (samples, neurons).

Hooks record passes in training mode with gradients on; eval and no_grad passes, those that activation checkpointing repeats inside
backward, and those of a deep copy of the model do not count. A layer with an activation module is read at that module's output; one whose
activation is a function, at the output of the module before, from a copy (it may work in place) to which it is applied in `take`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfless.layers import Discovery, Tap, chain, neuron_axis, within
from selfless.preserve import Preserver, State

PILE = 64  # forward passes recorded without a penalty() before we say so
Activation = Callable[[Tensor], Tensor]


class Hook:
    """A forward hook that belongs to one keeper: copies and pickles of the model carry an inert one instead."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args) if self.call is not None else None

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


class Recording:
    """Hooks and what they recorded since the last `take` or `drop`."""

    def __init__(self, model: nn.Module, taps: dict[str, Tap], auto: bool, activations: bool, weights: bool) -> None:
        self.model, self.taps, self.auto = model, taps, auto
        self._activations, self._weights = activations, weights
        self._records: dict[str, list[tuple[Tensor, Activation | None]]] = {}
        self.reached: set[str] = set()
        self.silent: str | None = None  # a named layer that no activation follows
        self._watch: Discovery | None = None
        self._handles: dict[str, Any] = {}
        self._model_handles: list[Any] = []
        self.listen()

    @property
    def open(self) -> bool:
        """Whether a forward pass has still to show something: a layer's activation, or the weights behind it."""
        return any(not tap.complete or (self._weights and tap.weighted is None) for tap in self.taps.values())

    def listen(self) -> None:
        """Place the hooks that are missing: on complete taps, and on the whole model while some are open."""
        if self._activations:
            for name, tap in self.taps.items():
                if tap.complete and name not in self._handles:
                    self._handles[name] = tap.module.register_forward_hook(Hook(self._recorder(name, tap)))
        if self.open and (self._activations or self._weights) and not self._model_handles:
            self._model_handles = [
                self.model.register_forward_pre_hook(Hook(self._before)),
                self.model.register_forward_hook(Hook(self._after), always_call=True),
            ]
        if not self.open:
            self._forget_model()

    def stop(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._forget_model()
        self._handles, self._records = {}, {}

    def _forget_model(self) -> None:
        for handle in self._model_handles:
            handle.remove()
        self._model_handles = []

    # ------------------------------------------------------------------------------------------------------------ discovering
    def _before(self, module: nn.Module, *_: Any) -> None:
        if module is self.model and self._watch is None and not torch.compiler.is_compiling() and _forward():
            self._watch = Discovery(self.model)
            self._watch.start()

    def _after(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        watch, self._watch = self._watch, None
        if watch is None:
            return
        watch.stop()
        if output is None:
            return  # the pass raised: the next one will show
        already = set(self._handles)
        self.learn(watch)
        for name, (tensor, activation) in watch.seen.items():
            if name in self.taps and name not in already and self._activations and self.model.training and torch.is_grad_enabled():
                self._add(name, self.taps[name], tensor, activation)

    def learn(self, watch: Discovery) -> None:
        """Take what a watched pass showed. "auto" drops layers that ran and no activation followed; those that did not run stay open."""
        taps = {name: watch.complete(name, tap) for name, tap in self.taps.items()}
        silent = [name for name, tap in taps.items() if not tap.complete and name in watch.reached]
        if self.auto:
            taps = {name: tap for name, tap in taps.items() if name not in silent}
        elif silent:
            self.silent = silent[0]
        self.taps = taps
        self.listen()

    # -------------------------------------------------------------------------------------------------------------- recording
    def _recorder(self, name: str, tap: Tap) -> Callable[..., None]:
        def hook(module: nn.Module, _inputs: Any, output: Tensor) -> None:
            if module.training and torch.is_grad_enabled() and _forward():
                self._add(name, tap, output if tap.activation is None else output.clone(), tap.activation)

        return hook

    def _add(self, name: str, tap: Tap, tensor: Tensor, activation: Activation | None) -> None:
        pile = self._records.setdefault(name, [])
        if len(pile) == PILE:
            warnings.warn(
                f"{PILE} forward passes were recorded without keeper.penalty(); call it every step or keeper.detach()", stacklevel=2
            )
            pile.clear()
        pile.append((tensor, activation))

    def drop(self) -> None:
        """Forget passes whose graph is over: the optimizer has stepped."""
        self._records = {}

    def take(self) -> dict[str, Tensor]:
        """{layer: h (samples, neurons)} of the passes since the last take or step, several as one larger batch."""
        records, self._records = self._records, {}
        self.reached |= set(records)
        return {name: self._joined(self.taps[name], parts) for name, parts in records.items()}

    def _joined(self, tap: Tap, parts: list[tuple[Tensor, Activation | None]]) -> Tensor:
        hs = [tensor if activation is None else activation(tensor) for tensor, activation in parts]
        rows = [h if h.dim() == 2 else h.movedim(neuron_axis(h, tap.axis), -1).flatten(0, -2) for h in hs]
        if len({r.shape[1] for r in rows}) > 1:
            sizes = ", ".join(str(r.shape[1]) for r in rows)
            raise RuntimeError(
                f"one layer gave {sizes} neurons in one step: its activation module serves several layers; name the modules before it"
            )
        return torch.cat(rows) if len(rows) > 1 else rows[0]


class Drops:
    """Hooks that turn nodes of hidden layers off, towards θ_{k−1}: a layer is linear in its parameters, so with those of `dropped` it gives

        y_i of θ_{k−1} if node i is off, else (y_i − p y_i of θ_{k−1})/(1 − p)

    In training mode with gradients on; the nodes are drawn once a step. `skip` names layers that have no nodes, such as heads.
    """

    def __init__(self, model: nn.Module, rate: float, skip: Sequence[str] = ()) -> None:
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        found = {n: m for n, m in model.named_modules() if isinstance(m, kinds) and not any(within(n, s) for s in skip)}
        last = next((n for n, m in reversed(found.items()) if isinstance(m, nn.Linear)), "") if not skip else ""
        self.rate, self.draw = rate, torch.rand
        self._layers = {n: m for n, m in found.items() if n != last}
        self._anchor: Mapping[str, Tensor] = {}
        self._off: dict[str, Tensor] = {}
        self._handles = [m.register_forward_hook(Hook(self._turned(n)), prepend=True) for n, m in self._layers.items()]

    def follow(self, state: State) -> None:
        """θ_{k−1}."""
        self._anchor = state["anchor"]

    def renew(self) -> None:
        """The step is over."""
        self._off = {}

    def _nodes(self, name: str) -> Tensor:
        if not self._off:
            sizes = [m.weight.shape[0] for m in self._layers.values()]
            drawn = (self.draw(sum(sizes)) < self.rate).split(sizes)
            self._off = dict(zip(self._layers, drawn, strict=True))
        return self._off[name]

    def _turned(self, name: str) -> Callable[..., Tensor | None]:
        def hook(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if f"{name}.weight" not in self._anchor or not module.training or not torch.is_grad_enabled():
                return None
            weight = self._anchor[f"{name}.weight"].to(module.weight.dtype)
            bias = None if module.bias is None else self._anchor.get(f"{name}.bias", module.bias).to(module.bias.dtype)
            linear = isinstance(module, nn.Linear)
            before = F.linear(inputs[0], weight, bias) if linear else module._conv_forward(inputs[0], weight, bias)
            off = self._nodes(name).to(output.device).view(-1, *[1] * (0 if linear else module.weight.dim() - 2))
            return torch.where(off, before, (output - self.rate * before) / (1 - self.rate))

        return hook

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()


class Gates:
    """Hooks that multiply the outputs of a model's hidden activation modules by a preserver's gates.

    In training mode with gradients on, by those of the step: leaves, whose gradients `take` gives after the backward pass. In any other
    pass, by the hard ones of the task that is being judged. Before the first `begin`, by nothing.
    """

    def __init__(self, model: nn.Module, taps: Mapping[str, Tap], preserve: Preserver) -> None:
        open_ = [name for name, tap in taps.items() if not tap.at_input]
        if open_:
            raise ValueError(
                f"gates stand behind activation modules, and none is known to follow {open_[0]!r}: use nn.ReLU() modules and name them, "
                f'layers=["act1", …]; where each task has an output layer of its own, name those: heads=["{open_[0]}", …]'
            )
        self.preserve = preserve
        self.wiring = chain(model, {name: tap.module for name, tap in taps.items()})
        self._axes = {name: tap.axis for name, tap in taps.items()}
        self._state: State = {}
        self._hard: dict[str, Tensor] = {}
        self._leaves: dict[str, Tensor] = {}
        self._steps, self._batches = 0, 0
        self._scale: Tensor | float = 0.0
        self._handles = [tap.module.register_forward_hook(Hook(self._gate(name)), prepend=True) for name, tap in taps.items()]

    def follow(self, state: State, task: int | None = None) -> None:
        """The state that gates are made of from now on, and the task (None: the present one) that is judged."""
        if state is not self._state:
            self._leaves = {}
        self._state = state
        self._hard = self.preserve.kept_gate(state, task) if task is not None or self._batches else {}

    def begin(self, batches: int) -> None:
        """An epoch of so many batches begins."""
        self._steps, self._batches, self._leaves, self._scale = 0, batches, {}, 0.0

    @property
    def share(self) -> float:
        return min(self._steps / (self._batches - 1), 1.0) if self._batches > 1 else 1.0

    def leaves(self) -> dict[str, Tensor]:
        """The gates of this step."""
        if not self._batches:
            raise RuntimeError("gates are drawn when a task begins: call keeper.turn(epoch, epochs, batches=len(loader)) before each epoch")
        if not self._leaves:
            self._leaves = {n: g.detach().requires_grad_() for n, g in self.preserve.gate(self._state, self.share).items()}
        return self._leaves

    def scaled(self, scale: Tensor) -> None:
        """The factor of the loss in a backward pass (a GradScaler's, or one over the batches accumulated): the penalty's own gradient."""
        self._scale = self._scale + scale.detach()

    def take(self) -> tuple[dict[str, Tensor], float] | None:
        """(∂loss/∂gate, the share of the epoch) of the step that was just made; None if no gate took part."""
        leaves, share, scale = self._leaves, self.share, self._scale
        if not any(leaf.grad is not None for leaf in leaves.values()):
            return None
        self._leaves, self._steps, self._scale = {}, self._steps + 1, 0.0
        factor = scale if isinstance(scale, Tensor) else 1.0
        found = {n: torch.zeros_like(a) if a.grad is None else a.grad / factor for n, a in leaves.items()}
        finite = all(bool(torch.isfinite(g).all()) for g in found.values())  # not what a step that a GradScaler skipped has left
        return (found, share) if finite else None

    def _gate(self, name: str) -> Callable[..., Tensor | None]:
        def hook(module: nn.Module, _inputs: Any, output: Tensor) -> Tensor | None:
            gates = self.leaves() if module.training and torch.is_grad_enabled() and self._batches else self._hard
            if name not in gates:
                return None
            axis = neuron_axis(output, self._axes[name])
            shape = [1] * output.dim()
            shape[axis] = -1
            return output * gates[name].to(output.dtype).view(shape)

        return hook

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()


def _forward() -> bool:
    """Whether this is a forward pass of its own, not one that activation checkpointing repeats inside backward."""
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1
