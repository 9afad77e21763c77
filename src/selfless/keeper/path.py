"""Separate the task loss's gradient from the penalties', for path integrals (SI).

A training loop calls `(loss + keeper.penalty()).backward()`, so `p.grad` holds both, perhaps scaled (a GradScaler, a division by the number
of accumulated batches) and later clipped. What is needed is ∂(task loss)/∂θ at its true scale. The penalty tensor knows: its own gradient
in that backward pass is the scale s, and its parameter gradient is computed apart. Over the backward passes j before one optimizer step,

    g = (Σ_j raw_j − Σ_j s_j ∂penalty_j/∂θ) / Σ_j s_j.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

Step = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]


class PathWatch:
    """Watches gradients as they accumulate, and parameters as they move."""

    def __init__(self) -> None:
        self._parameters: dict[str, nn.Parameter] = {}
        self._handles: dict[str, Any] = {}
        self._before: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._raw: dict[str, Tensor] = {}
        self._leak: dict[str, Tensor] = {}
        self._scale: Tensor | float = 0.0

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Watch these parameters from here on: heads may have been added, others frozen or moved to another device."""
        for name in list(self._parameters):
            if self._parameters[name] is not parameters.get(name):
                self._handles.pop(name).remove()
                del self._parameters[name]
        for name, parameter in parameters.items():
            if name not in self._parameters:
                self._handles[name] = parameter.register_post_accumulate_grad_hook(self._keep(name))
                self._parameters[name] = parameter
                self._mark(name)
            elif self._before[name].device != parameter.device:
                self._mark(name)

    def begin(self) -> None:
        """Start a task: what moved the parameters before does not count."""
        self._reset()
        for name in self._parameters:
            self._mark(name)

    def _keep(self, name: str) -> Any:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._raw[name] = parameter.grad.detach().clone()

        return hook

    def _mark(self, name: str) -> None:
        parameter = self._parameters[name]
        self._before[name], self._versions[name] = parameter.detach().clone(), parameter._version

    def note_penalty(self, penalty: Tensor, parts: Tensor | None) -> None:
        """Note the penalty of this backward pass; `parts` is the part that depends on the parameters, or None."""
        leak: dict[str, Tensor] = {}
        if parts is not None and parts.requires_grad:
            grads = torch.autograd.grad(parts, list(self._parameters.values()), retain_graph=True, allow_unused=True)
            leak = {n: g for n, g in zip(self._parameters, grads, strict=True) if g is not None}

        def note(scale: Tensor) -> None:
            if all(p.grad is None or not bool(p.grad.any()) for p in self._parameters.values()):
                self._reset()  # gradients start afresh: what a skipped step (a GradScaler met infinity) left does not count
            self._scale = self._scale + scale.detach()
            for name, g in leak.items():
                self._leak[name] = self._leak[name] + scale * g if name in self._leak else scale * g

        penalty.register_hook(note)

    def moved(self) -> bool:
        """True if parameters were changed in place since the last step that was seen (optimizers report their own steps)."""
        return any(p._version != self._versions[n] for n, p in self._parameters.items())

    def step(self) -> Step:
        """Return (θ before, θ after, task-loss gradient) of the step just made."""
        raw = self._raw or {n: p.grad.detach().clone() for n, p in self._parameters.items() if p.grad is not None}
        scale = self._scale if isinstance(self._scale, Tensor) else 1.0  # no penalty in the backward pass: nothing to undo
        task = {n: (g - self._leak[n] if n in self._leak else g) / scale for n, g in raw.items() if n in self._parameters}
        before = {n: self._before[n] for n in task}
        after = {n: self._parameters[n].detach().clone() for n in task}
        self.begin()
        return before, after, task

    def _reset(self) -> None:
        self._raw, self._leak, self._scale = {}, {}, 0.0

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles, self._parameters = {}, {}
