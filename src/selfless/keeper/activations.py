"""Collect the post-activations of the chosen layers from a loop's forward passes, as (samples, neurons).

Only passes in training mode with gradients on count. Passes in eval mode or under no_grad, those that activation checkpointing repeats
inside backward, and those of a deep copy of the model do not. A layer with an activation module is read at that module's output. A layer
whose activation is a function is read at the output of the module before it, from a copy to which `take` applies the function.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfless.keeper.hook import Hook, is_forward_pass
from selfless.network.calling import Forward, evaluating, run_batch, to_device
from selfless.network.discovery import Discovery
from selfless.network.layers import Layers, Tap, is_automatic, resolve
from selfless.network.roles import neuron_axis

PILE = 64  # forward passes collected without a penalty() before the user is warned
Activation = Callable[[Tensor], Tensor]


def resolve_layers(model: nn.Module, layers: Layers, heads: Sequence[str], compiled: bool, needed: bool) -> dict[str, Tap]:
    """Return the taps of `layers`; {} if none was found, nobody named any, and none is `needed`."""
    automatic = is_automatic(layers)
    try:
        taps = resolve(model, layers, heads)
    except ValueError:
        if automatic and not needed:
            return {}
        raise
    open_taps = [name for name, tap in taps.items() if not tap.complete]
    if compiled and open_taps and not automatic:
        raise ValueError(
            f"layer {open_taps[0]!r} is inside a compiled model, where the activation function after it cannot be seen; "
            "name its activation module instead"
        )
    if compiled:
        taps = {name: tap for name, tap in taps.items() if tap.complete}
    if needed and not taps:
        raise ValueError("no layer was found for the sparsifier; pass layers=[names of activation modules]")
    return taps


class Collector:
    """Hooks, and the activations they collected since the last `take` or `drop`."""

    def __init__(self, model: nn.Module, taps: dict[str, Tap], auto: bool, activations: bool, weights: bool) -> None:
        self.model, self.taps, self.auto = model, taps, auto
        self._activations, self._weights = activations, weights
        self._passes: dict[str, list[tuple[Tensor, Activation | None]]] = {}
        self.reached: set[str] = set()
        self.silent: str | None = None  # a named layer that no activation follows
        self._watch: Discovery | None = None
        self._handles: dict[str, Any] = {}
        self._model_handles: list[Any] = []
        self.listen()

    @property
    def is_open(self) -> bool:
        """True while a forward pass must still show something: a layer's activation, or the weights before it."""
        return any(not tap.complete or (self._weights and tap.weighted is None) for tap in self.taps.values())

    def listen(self) -> None:
        """Place the hooks that are missing: on complete taps, and on the whole model while some are open."""
        if self._activations:
            for name, tap in self.taps.items():
                if tap.complete and name not in self._handles:
                    self._handles[name] = tap.module.register_forward_hook(Hook(self._collect(name, tap)))
        if self.is_open and (self._activations or self._weights) and not self._model_handles:
            self._model_handles = [
                self.model.register_forward_pre_hook(Hook(self._before)),
                self.model.register_forward_hook(Hook(self._after), always_call=True),
            ]
        if not self.is_open:
            self._forget_model()

    def stop(self) -> None:
        """Remove the hooks and forget everything."""
        for handle in self._handles.values():
            handle.remove()
        self._forget_model()
        self._handles, self._passes = {}, {}

    def _forget_model(self) -> None:
        for handle in self._model_handles:
            handle.remove()
        self._model_handles = []

    # ----------------------------------------------------------------------------------------------------------- find activations
    def _before(self, module: nn.Module, *_: Any) -> None:
        if module is self.model and self._watch is None and not torch.compiler.is_compiling() and is_forward_pass():
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
        """Learn from a watched pass. "auto" drops layers that ran without an activation after them; those that did not run stay open."""
        taps = {name: watch.complete(name, tap) for name, tap in self.taps.items()}
        silent = [name for name, tap in taps.items() if not tap.complete and name in watch.reached]
        if self.auto:
            taps = {name: tap for name, tap in taps.items() if name not in silent}
        elif silent:
            self.silent = silent[0]
        self.taps = taps
        self.listen()

    def show(self, batches: Iterable[Any], forward: Forward | None) -> Iterable[Any]:
        """Run the first batch if no forward pass has shown the activations yet; return all batches."""
        if all(tap.complete for tap in self.taps.values()):
            return batches
        rest = iter(batches)
        first = next(rest, None)
        if first is None:
            raise ValueError("there is no data to consolidate: the batches are empty (a generator that was used up, perhaps?)")
        watch = Discovery(self.model)
        with evaluating(self.model), torch.no_grad():
            watch.start()
            try:
                run_batch(self.model, to_device(first, self.model), forward)
            finally:
                watch.stop()
        self.learn(watch)
        return itertools.chain([first], rest)

    # ------------------------------------------------------------------------------------------------------------------- collect
    def _collect(self, name: str, tap: Tap) -> Callable[..., None]:
        def hook(module: nn.Module, _inputs: Any, output: Tensor) -> None:
            if module.training and torch.is_grad_enabled() and is_forward_pass():
                self._add(name, tap, output if tap.activation is None else output.clone(), tap.activation)

        return hook

    def _add(self, name: str, tap: Tap, tensor: Tensor, activation: Activation | None) -> None:
        pile = self._passes.setdefault(name, [])
        if len(pile) == PILE:
            warnings.warn(
                f"{PILE} forward passes were collected without keeper.penalty(); call it every step or keeper.detach()", stacklevel=2
            )
            pile.clear()
        pile.append((tensor, activation))

    def drop(self) -> None:
        """Forget the passes of a step that is over."""
        self._passes = {}

    def take(self) -> dict[str, Tensor]:
        """{layer: h (samples, neurons)} of the passes since the last take or step, several as one larger batch."""
        passes, self._passes = self._passes, {}
        self.reached |= set(passes)
        return {name: self._join(self.taps[name], parts) for name, parts in passes.items()}

    def _join(self, tap: Tap, parts: list[tuple[Tensor, Activation | None]]) -> Tensor:
        hs = [tensor if activation is None else activation(tensor) for tensor, activation in parts]
        rows = [h if h.dim() == 2 else h.movedim(neuron_axis(h, tap.axis), -1).flatten(0, -2) for h in hs]
        if len({r.shape[1] for r in rows}) > 1:
            sizes = ", ".join(str(r.shape[1]) for r in rows)
            raise RuntimeError(
                f"one layer gave {sizes} neurons in one step: its activation module serves several layers; name the modules before it"
            )
        return torch.cat(rows) if len(rows) > 1 else rows[0]
