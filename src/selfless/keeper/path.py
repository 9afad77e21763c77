"""Separate the gradient of the task loss from that of the penalties, for path integrals (SI).

A training loop calls `(loss + keeper.penalty()).backward()`, so `p.grad` is the sum of both gradients. It may be scaled (by a GradScaler,
or by 1/accumulated batches) and is clipped later. A path integral needs ∂(task loss)/∂θ without that scale s. The gradient of the penalty
tensor in the backward pass is s, and ∂penalty/∂θ is computed separately. Over the backward passes j before one optimizer step,

    g = (Σ_j grad_j − Σ_j s_j ∂penalty_j/∂θ) / Σ_j s_j.

With several optimizers, each step ends the sums of the parameters that it steps, and of no others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Step = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]
MOST = 1_000  # backward passes whose scale is remembered for parameters that no optimizer steps


class PathWatch:
    """Hooks that read gradients when they accumulate, and the change of parameters in a step."""

    def __init__(self) -> None:
        self._parameters: dict[str, nn.Parameter] = {}
        self._handles: dict[str, Any] = {}
        self._before: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._gradients: dict[str, Tensor] = {}  # Σ_j grad_j: p.grad before it is clipped
        self._counts: dict[str, int] = {}  # the version of p.grad then
        self._penalty_gradients: dict[str, Tensor] = {}  # Σ_j s_j ∂penalty_j/∂θ
        self._scales: list[Tensor] = []  # s_j
        self._used: dict[str, int] = {}  # how many of them the last step of a parameter has used

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Watch these parameters from now on. Since the last call some may be new, frozen or on another device."""
        for name in list(self._parameters):
            if self._parameters[name] is not parameters.get(name):
                self._handles.pop(name).remove()
                del self._parameters[name]
                self._end(name)
        for name, parameter in parameters.items():
            if name not in self._parameters:
                self._handles[name] = parameter.register_post_accumulate_grad_hook(self._copy_gradient(name))
                self._parameters[name] = parameter
                self._copy_value(name)
            elif self._before[name].device != parameter.device:
                self._copy_value(name)

    def begin(self) -> None:
        """Start a new step or task at the current parameters."""
        self._reset()
        for name in self._parameters:
            self._copy_value(name)

    def _copy_gradient(self, name: str) -> Any:
        """Return a hook that copies the accumulated gradient of a parameter."""

        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None:
                g = parameter.grad.detach()
                self._gradients[name] = g.to_dense() if g.is_sparse else g.clone()
                self._counts[name] = parameter.grad._version

        return hook

    def _copy_value(self, name: str) -> None:
        parameter = self._parameters[name]
        self._before[name], self._versions[name] = parameter.detach().clone(), parameter._version

    def note_penalty(self, penalty: Tensor, parts: Tensor | None) -> None:
        """Prepare for the backward pass of this penalty; `parts` is the part that depends on the parameters, or None."""
        found: dict[str, Tensor] = {}
        if parts is not None and parts.requires_grad:
            grads = torch.autograd.grad(parts, list(self._parameters.values()), retain_graph=True, allow_unused=True)
            found = {n: g for n, g in zip(self._parameters, grads, strict=True) if g is not None}

        def add(scale: Tensor) -> None:
            self.begin_backward(scale)
            self.add_penalty({name: scale * g for name, g in found.items()})

        penalty.register_hook(add)

    def begin_backward(self, scale: Tensor) -> None:
        """Note a backward pass of a loss with the factor `scale`, before any gradient has accumulated."""
        if all(p.grad is None or not bool(p.grad.any()) for p in self._parameters.values()):
            self._reset()  # gradients were set to zero: a step that a GradScaler skipped does not count
        for name in [n for n in self._gradients if self._is_zero(n)]:
            self._end(name)  # those of one of several optimizers were
        self._scales.append(scale.detach())
        if surplus := max(0, len(self._scales) - MOST):
            del self._scales[:surplus]
            self._used = {n: max(0, used - surplus) for n, used in self._used.items()}

    def _is_zero(self, name: str) -> bool:
        """Return True if p.grad was set to zero or None since it was copied; numbers are read only if it has changed."""
        g = self._parameters[name].grad
        return g is None or (g._version != self._counts[name] and not bool(g.any()))

    def add_penalty(self, gradients: Mapping[str, Tensor]) -> None:
        """Add s_j ∂penalty_j/∂θ of a part of the penalty."""
        total = self._penalty_gradients
        for name, g in gradients.items():
            total[name] = total[name] + g if name in total else g

    def stepped(self) -> bool:
        """Return True if a step was taken that no optimizer reported: parameters have other values, after a backward pass.

        Other changes are no step: weights that were exchanged for an evaluation and put back, or pruned at the start of a phase.
        """
        moved = [n for n, p in self._parameters.items() if p._version != self._versions[n]]
        if not any(not torch.equal(self._parameters[n].detach(), self._before[n]) for n in moved):
            self._versions |= {n: self._parameters[n]._version for n in moved}
            return False
        if not self._gradients:
            self.begin()
        return bool(self._gradients)

    def step(self, names: Collection[str]) -> Step:
        """Return (θ before, θ after, gradient of the task loss) of the last step, which was one of these parameters."""
        own = {n: p for n, p in self._parameters.items() if n in names}
        gradients, penalty, scales = self._gradients, self._penalty_gradients, dict[int, Tensor | float]()
        if not gradients:
            gradients = {
                n: p.grad.to_dense() if p.grad.is_sparse else p.grad.detach().clone() for n, p in own.items() if p.grad is not None
            }
        task: dict[str, Tensor] = {}
        for name in (n for n in own if n in gradients):
            used = self._used.get(name, 0)
            if used not in scales:  # without a penalty in the loss its scale is unknown
                scales[used] = torch.stack(self._scales[used:]).sum() if self._scales[used:] else 1.0
            task[name] = (gradients[name] - penalty[name] if name in penalty else gradients[name]) / scales[used]
        before, after = {n: self._before[n] for n in task}, {n: own[n].detach() for n in task}
        for name in own:
            self._copy_value(name)
            self._end(name)
        if not self._gradients:
            self._reset()
        return before, after, task

    def _end(self, name: str) -> None:
        """End the sums of one parameter."""
        self._gradients.pop(name, None)
        self._penalty_gradients.pop(name, None)
        self._used[name] = len(self._scales)

    def _reset(self) -> None:
        self._gradients, self._penalty_gradients, self._scales, self._used = {}, {}, [], {}

    def nbytes(self) -> int:
        """Return the bytes of the copies: θ before a step, its gradient and that of the penalty."""
        copies = (self._before, self._gradients, self._penalty_gradients)
        return sum(t.numel() * t.element_size() for tensors in copies for t in tensors.values())

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles, self._parameters = {}, {}
