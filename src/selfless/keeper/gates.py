"""Multiply hidden activations by gates in a training loop, for preservers with the capability `Gated`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from selfless.distributed import ALONE, Ranks
from selfless.keeper.activations import BEFORE_COMPILING
from selfless.keeper.hook import Hook
from selfless.network.layers import Tap
from selfless.network.roles import is_known_activation, neuron_axis
from selfless.network.wiring import Wiring, chain
from selfless.preserve.capabilities import Gated, State


def wire(model: nn.Module, taps: Mapping[str, Tap]) -> Wiring:
    """Return the wiring of a chain of layers, each hidden one with an activation module among the taps."""
    without_module = [name for name, tap in taps.items() if not tap.at_input]
    if without_module:
        name, known = without_module[0], [n for n, module in model.named_modules() if is_known_activation(module)]
        remedy = f"name them: layers={known}" if known else 'use nn.ReLU() modules and name them: layers=["act1", …]'
        raise ValueError(
            f"hidden layers need activation modules here, but none is known to follow {name!r}: {remedy}. If {name!r} is the output layer "
            f'of a task, name these layers: heads=["{name}", …]'
        )
    return chain(model, {name: tap.module for name, tap in taps.items()})


class Gates:
    """Hooks that multiply the outputs of the hidden activation modules of a model by the gates of a preserver.

    In training mode with gradients on, they use the gates of the step. These are leaves; `take` returns their gradients after the backward
    pass. All other passes use the hard gates of the evaluated task. Before the first `begin_epoch` there are no gates.
    """

    def __init__(self, model: nn.Module, taps: Mapping[str, Tap], term: Gated) -> None:
        self.term = term
        self.wiring = wire(model, taps)
        self._axes = {name: tap.axis for name, tap in taps.items()}
        self._state: State = {}
        self._hard: dict[str, Tensor] = {}
        self._leaves: dict[str, Tensor] = {}
        self.steps, self._batches = 0, 0  # steps so far, and steps of this epoch
        self._begun = False  # True from the first epoch on, also if that was before the state was saved
        self._acted, self._missed = False, False  # True if a forward pass had the gates of this step; if the last step had none
        self._scale: Tensor | float = 0.0
        self.on_leaves: Callable[[dict[str, Tensor]], None] | None = None  # is given the gates of a step when they are made
        self._handles = [tap.module.register_forward_hook(Hook(self._gate(name)), prepend=True) for name, tap in taps.items()]

    def follow(self, state: State, task: int | None = None) -> None:
        """Use the gates of this state from now on; `task` is the evaluated task (None: the current one)."""
        if state is not self._state:
            self._leaves = {}
        self._state = state
        self._hard = self.term.hard_gate(state, task) if task is not None or self._begun else {}

    def begin_epoch(self, batches: int) -> None:
        """Start annealing the gates over an epoch of `batches` optimizer steps."""
        if 0 < self.steps < self._batches / 2:
            warnings.warn(
                f"the last epoch had {self.steps} optimizer steps, but begin_epoch was told batches={self._batches}, so its gates were "
                "not annealed to the end; if gradients are accumulated, give the number of steps",
                stacklevel=4,
            )
        self.steps, self._batches, self._leaves, self._scale, self._begun = 0, batches, {}, 0.0, True

    def resume(self, state: State, begun: bool) -> None:
        """Use the gates of a state that was saved, after the first epoch if `begun`."""
        self._begun = begun
        self.follow(state)

    @property
    def share(self) -> float:
        """The share of the epoch that is over, from 0 to 1."""
        return min(self.steps / (self._batches - 1), 1.0) if self._batches > 1 else 1.0

    def leaves(self) -> dict[str, Tensor]:
        """The gates of this step."""
        if not self._batches:
            raise RuntimeError(
                "there are no gates yet: call keeper.begin_epoch(epoch, epochs, batches=steps of the epoch) before each epoch"
            )
        if not self._leaves:
            self._leaves = {n: g.detach().requires_grad_() for n, g in self.term.gate(self._state, self.share).items()}
            if self.on_leaves is not None:
                self.on_leaves(self._leaves)
        return self._leaves

    def check_acted(self) -> None:
        """Raise RuntimeError if no forward pass had gates since the last call, twice in a row: the first pass may come after it."""
        if not self._acted and self._missed:
            raise RuntimeError(
                f"{type(self.term).__name__} saw no forward pass since the last penalty(), so its gates did not act. Call penalty() after "
                f"model(x), in training mode and with gradients on. A compiled model must not have run before attach(): {BEFORE_COMPILING}"
            )
        self._acted, self._missed = False, not self._acted

    def note_scale(self, scale: Tensor) -> None:
        """Add the gradient of the penalty in a backward pass. It is the factor of the loss (GradScaler, 1/accumulated batches)."""
        self._scale = self._scale + scale.detach()

    def take(self, ranks: Ranks = ALONE) -> tuple[dict[str, Tensor], float] | None:
        """Return (∂loss/∂gate, the mean over ranks; share of the epoch) of the last step; None if no gate has a gradient."""
        leaves, share, scale = self._leaves, self.share, self._scale
        if not any(leaf.grad is not None for leaf in leaves.values()):
            return None
        self._leaves, self.steps, self._scale = {}, self.steps + 1, 0.0
        factor = scale if isinstance(scale, Tensor) else 1.0
        found = {n: torch.zeros_like(a) if a.grad is None else a.grad / factor for n, a in leaves.items()}
        ranks.mean_(list(found.values()))
        finite = all(bool(torch.isfinite(g).all()) for g in found.values())  # a GradScaler skips a step that is not finite
        return (found, share) if finite else None

    def _gate(self, name: str) -> Callable[..., Tensor | None]:
        """Return a forward hook that multiplies the output of a layer by its gates."""

        def hook(module: nn.Module, _inputs: Any, output: Tensor) -> Tensor | None:
            gates = self.leaves() if module.training and torch.is_grad_enabled() and self._batches else self._hard
            if name not in gates:
                return None
            self._acted |= gates is self._leaves
            axis = neuron_axis(output, self._axes[name])
            if output.shape[axis] != len(gates[name]):
                raise ValueError(
                    f"layer {name!r} has {output.shape[axis]} neurons, and its gates {len(gates[name])}; do not resize a layer that has "
                    "gates, add a new one to the model"
                )
            shape = [1] * output.dim()
            shape[axis] = -1
            return output * gates[name].to(output.dtype).view(shape)

        return hook

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
