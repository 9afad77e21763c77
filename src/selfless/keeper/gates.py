"""Multiply hidden activations by a preserver's gates while a loop trains, for preservers with the capability `Gated`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from selfless.keeper.hook import Hook
from selfless.network.layers import Tap
from selfless.network.roles import neuron_axis
from selfless.network.wiring import chain
from selfless.preserve.capabilities import Gated, State


class Gates:
    """Hooks that multiply the outputs of a model's hidden activation modules by a preserver's gates.

    In training mode with gradients on these are the gates of the step: leaves, whose gradients `take` returns after the backward pass.
    In any other pass they are the hard gates of the task that is evaluated. Before the first `begin_epoch` there are none.
    """

    def __init__(self, model: nn.Module, taps: Mapping[str, Tap], term: Gated) -> None:
        open_ = [name for name, tap in taps.items() if not tap.at_input]
        if open_:
            raise ValueError(
                f"gates stand behind activation modules, and none is known to follow {open_[0]!r}: use nn.ReLU() modules and name them, "
                f'layers=["act1", …]; where each task has an output layer of its own, name those: heads=["{open_[0]}", …]'
            )
        self.term = term
        self.wiring = chain(model, {name: tap.module for name, tap in taps.items()})
        self._axes = {name: tap.axis for name, tap in taps.items()}
        self._state: State = {}
        self._hard: dict[str, Tensor] = {}
        self._leaves: dict[str, Tensor] = {}
        self.steps, self._batches = 0, 0  # of this epoch
        self._scale: Tensor | float = 0.0
        self._handles = [tap.module.register_forward_hook(Hook(self._gate(name)), prepend=True) for name, tap in taps.items()]

    def follow(self, state: State, task: int | None = None) -> None:
        """Make gates of this state from now on; `task` is the one that is evaluated (None: the present one)."""
        if state is not self._state:
            self._leaves = {}
        self._state = state
        self._hard = self.term.hard_gate(state, task) if task is not None or self._batches else {}

    def begin_epoch(self, batches: int) -> None:
        """Start annealing the gates over an epoch of so many batches."""
        self.steps, self._batches, self._leaves, self._scale = 0, batches, {}, 0.0

    @property
    def share(self) -> float:
        return min(self.steps / (self._batches - 1), 1.0) if self._batches > 1 else 1.0

    def leaves(self) -> dict[str, Tensor]:
        """The gates of this step."""
        if not self._batches:
            raise RuntimeError("gates start with a task: call keeper.begin_epoch(epoch, epochs, batches=len(loader)) before each epoch")
        if not self._leaves:
            self._leaves = {n: g.detach().requires_grad_() for n, g in self.term.gate(self._state, self.share).items()}
        return self._leaves

    def note_scale(self, scale: Tensor) -> None:
        """Note the factor of the loss in a backward pass (a GradScaler's, or 1/accumulated batches): it is the penalty's own gradient."""
        self._scale = self._scale + scale.detach()

    def take(self) -> tuple[dict[str, Tensor], float] | None:
        """Return (∂loss/∂gate, the share of the epoch) of the step just made; None if no gate took part."""
        leaves, share, scale = self._leaves, self.share, self._scale
        if not any(leaf.grad is not None for leaf in leaves.values()):
            return None
        self._leaves, self.steps, self._scale = {}, self.steps + 1, 0.0
        factor = scale if isinstance(scale, Tensor) else 1.0
        found = {n: torch.zeros_like(a) if a.grad is None else a.grad / factor for n, a in leaves.items()}
        finite = all(bool(torch.isfinite(g).all()) for g in found.values())  # a GradScaler skips a step that is not finite
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
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
