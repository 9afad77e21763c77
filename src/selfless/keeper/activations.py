"""What the forward passes of a training step gave: the post-activations of the chosen layers, as (samples, neurons).

Hooks record passes in training mode with gradients on; eval and no_grad passes, those that activation checkpointing repeats inside
backward, and those of a deep copy of the model do not count. A layer with an activation module is read at that module's output; one whose
activation is a function, at the output of the module before, from a copy (it may work in place) to which it is applied in `take`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from selfless.keeper.hook import Hook, _forward
from selfless.network.discovery import Discovery
from selfless.network.layers import Tap
from selfless.network.roles import neuron_axis

PILE = 64  # forward passes recorded without a penalty() before we say so


Activation = Callable[[Tensor], Tensor]


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
