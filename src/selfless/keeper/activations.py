"""Collect the post-activations of the chosen layers from the forward passes of a training loop, as (samples, neurons).

A pass counts if it is in training mode and gradients are on. Passes in eval mode or under no_grad, passes that activation checkpointing
repeats inside backward, and passes of a deep copy of the model do not count. If a layer has an activation module, h is the output of that
module. If its activation is a function, n is copied at the output of the module before it, and `take` applies the function. Padded tokens
are left out (`selfless.keeper.padding`).
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from selfless.keeper.hook import Hook, is_forward_pass
from selfless.keeper.padding import Counted, Padding
from selfless.network.calling import Forward, evaluating, run_batch, to_device
from selfless.network.discovery import Discovery
from selfless.network.layers import Layers, Tap, is_automatic, resolve
from selfless.network.roles import neuron_axis

MOST_PASSES = 64  # warn after this many forward passes without a penalty()
BEFORE_COMPILING = "attach to the plain model and run it on one batch before torch.compile"
Activation = Callable[[Tensor], Tensor]


def resolve_layers(model: nn.Module, layers: Layers, heads: Sequence[str], compiled: bool, needed: bool) -> dict[str, Tap]:
    """Return the taps of `layers`. For "auto" and "all" return {} if there are no hidden layers and none is `needed`."""
    automatic = is_automatic(layers)
    try:
        taps = resolve(model, layers, heads)
    except ValueError:
        if automatic and not needed:
            return {}
        raise
    incomplete = [name for name, tap in taps.items() if not tap.complete]
    if compiled and incomplete and not automatic:
        raise ValueError(
            f"layer {incomplete[0]!r} is inside a compiled model, where the activation function after it cannot be found; "
            f"name its activation module instead, or {BEFORE_COMPILING}"
        )
    if compiled:
        taps = {name: tap for name, tap in taps.items() if tap.complete}
    if needed and not taps:
        where = " in the compiled model, which hides activation functions" if compiled else ""
        remedy = f", or {BEFORE_COMPILING}" if compiled else ""
        raise ValueError(f"found no layer for the sparsifier{where}; pass layers=[names of activation modules]{remedy}")
    return taps


class Collector:
    """Hooks, and the activations they collected since the last `take` or `drop`."""

    def __init__(self, model: nn.Module, taps: dict[str, Tap], auto: bool, activations: bool, weights: bool) -> None:
        self.model, self.taps, self.auto = model, taps, auto
        self._activations, self._weights = activations, weights
        self.padding = Padding(model) if activations else None
        self.passes: dict[str, list[tuple[Tensor, Activation | None, Counted | None]]] = {}
        self.reached: set[str] = set()
        self.paused = False  # True inside `pausing`
        self.on_pass: Callable[[str, Tensor, Activation | None, Counted | None], None] | None = None  # takes the passes instead of `take`
        self.on_left_out: Callable[[list[str], int], None] | None = None  # is told which layers "auto" left out
        self.silent: str | None = None  # a layer of layers=[…] without an activation after it
        self._watch: Discovery | None = None
        self._handles: dict[str, Any] = {}
        self._model_handles: list[Any] = []
        self.listen()

    @property
    def is_open(self) -> bool:
        """True while the activation of a layer, its neuron axis, or the weights before it must still be found by a forward pass."""
        return any(not tap.settled or (self._weights and tap.weighted is None) for tap in self.taps.values())

    def listen(self) -> None:
        """Add the missing hooks: on complete taps, and on the whole model while some taps are incomplete."""
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
            self._remove_model_hooks()

    def stop(self) -> None:
        """Remove the hooks and the collected activations."""
        for handle in self._handles.values():
            handle.remove()
        self._remove_model_hooks()
        if self.padding is not None:
            self.padding.stop()
        self._handles, self.passes = {}, {}

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Inside `with`, the keeper itself runs the model or autograd: nothing is collected, and nothing is injected."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def _remove_model_hooks(self) -> None:
        for handle in self._model_handles:
            handle.remove()
        self._model_handles = []

    # ----------------------------------------------------------------------------------------------------------- find activations
    def _before(self, module: nn.Module, *_: Any) -> None:
        """Start a discovery at the start of a forward pass of the whole model."""
        if module is self.model and self._watch is None and not torch.compiler.is_compiling() and is_forward_pass():
            self._watch = Discovery(self.model)
            self._watch.start()

    def _after(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        """End the discovery; collect from this pass the layers that had no hook of their own yet."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        watch.stop()
        if output is None:
            return  # the pass raised an error; the next one is watched again
        hooked = set(self._handles)
        self.learn(watch)
        for name, (tensor, activation) in watch.seen.items():
            if name in self.taps and name not in hooked and self._activations and self.model.training and torch.is_grad_enabled():
                self._add(name, tensor, activation, None if self.padding is None else self.padding.last)

    def learn(self, watch: Discovery) -> None:
        """Complete the taps after a discovery. "auto" removes layers that ran without an activation; layers that did not run stay."""
        taps = {name: watch.complete(name, tap) for name, tap in self.taps.items()}
        silent = [name for name, tap in taps.items() if not tap.complete and name in watch.reached]
        if self.auto:
            taps = {name: tap for name, tap in taps.items() if name not in silent}
            if silent and taps and self._activations and self.on_left_out is not None:
                self.on_left_out(silent, len(taps))
        elif silent:
            self.silent = silent[0]
        self.taps = taps
        self.listen()

    def complete_taps(self, batches: Iterable[Any], forward: Forward | None) -> Iterable[Any]:
        """Run the first batch if no forward pass has completed the taps yet; return all batches."""
        if all(tap.settled for tap in self.taps.values()):
            return batches
        rest = iter(batches)
        first = next(rest, None)
        if first is None:
            raise ValueError("consolidate() needs data, but the batches are empty; was the generator used before? Pass a DataLoader")
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
        """Return a forward hook that collects the activations of a complete tap."""

        def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
            trains = module.training or (self.model.training and isinstance(module, nn.modules.batchnorm._NormBase))  # a frozen norm
            if trains and torch.is_grad_enabled() and not self.paused and is_forward_pass():
                if not isinstance(output, Tensor):
                    kind = type(output).__name__
                    raise TypeError(f"layer {name!r} returns a {kind}, not a tensor of activations; name another one: layers=[…]")
                self._add(
                    name,
                    output if tap.activation is None else output.clone(),
                    tap.activation,
                    None if self.padding is None else self.padding.now,
                )

        return hook

    def _add(self, name: str, tensor: Tensor, activation: Activation | None, counted: Counted | None) -> None:
        """Keep one pass of a layer: h, or n and the activation to apply; and the tokens that count."""
        if self.on_pass is not None:
            self.on_pass(name, tensor, activation, counted)
            return
        passes = self.passes.setdefault(name, [])
        if len(passes) == MOST_PASSES:
            warnings.warn(
                f"{MOST_PASSES} forward passes were collected without keeper.penalty(); call it in every step, or call keeper.detach()",
                stacklevel=2,
            )
            passes.clear()
        passes.append((tensor, activation, counted))

    def drop(self) -> None:
        """Drop what was collected so far: the step is over."""
        self.passes = {}

    def take(self, is_alone: bool = True) -> dict[str, Tensor]:
        """Return {layer: h (samples, neurons)} of the passes since the last take or step; several passes become one larger batch.

        A layer that no sample reached, as an expert, is left out. Several ranks all need the same layers: not `is_alone`, that is an error.
        """
        passes, self.passes = self.passes, {}
        self.reached |= set(passes)
        reached = {name: parts for name, parts in passes.items() if not is_alone or any(tensor.numel() for tensor, _, _ in parts)}
        return {name: self.join(name, parts) for name, parts in (reached or passes).items()}

    def join(self, name: str, parts: list[tuple[Tensor, Activation | None, Counted | None]]) -> Tensor:
        """Return several passes of one layer as one tensor (samples, neurons)."""
        tap = self.taps[name]
        hs = [tensor if activation is None else activation(tensor) for tensor, activation, _ in parts]
        hs = [h if h.dim() == 2 else h.movedim(neuron_axis(h, tap.axis), -1) for h in hs]
        rows = [h.flatten(0, -2) if counted is None else counted.select(h) for h, (_, _, counted) in zip(hs, parts, strict=True)]
        if len({r.shape[1] for r in rows}) > 1:
            sizes = ", ".join(str(r.shape[1]) for r in rows)
            raise RuntimeError(
                f"a layer gave {sizes} neurons in one step: its activation module serves several layers; name the modules before it instead"
            )
        joined = torch.cat(rows) if len(rows) > 1 else rows[0]
        if not len(joined):
            raise ValueError(
                f"layer {name!r} got no samples, so its penalty is not defined; skip empty batches, or leave this layer out: layers=[…]"
            )
        return joined
