"""What keeps old tasks: the contract of a preserver.

A preserver is a frozen value. Its state is explicit, {"omega": {name: Ω}, "anchor": {name: θ*}, …}, all tensors, and its methods are
pure: state in, new state out. The keeper holds one state; an engine may stack many and map the same functions over them.
To add one: a file here, an entry in `selfless.preserve.PRESERVERS`, a row in tests/test_contracts.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selfless.importance import Estimator, FunctionNorm, Objective
from selfless.terms import Term

State = dict[str, dict[str, Tensor]]
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Preserver(Term):
    """λ_Ω · penalty(θ), nothing before the first task ended. The base class preserves nothing."""

    strength: float
    measures: ClassVar[bool] = False  # whether `consolidate` wants Ω measured on the task's data
    watches: ClassVar[bool] = False  # whether `observe` wants every optimizer step

    @property
    def objective(self) -> Objective:
        """What Ω and α are gradients of. The function's norm unless the preserver has its own."""
        return FunctionNorm()

    @property
    def how(self) -> Estimator:
        return "per-sample"

    def init(self, parameters: Tensors) -> State:
        """The state before the first task."""
        return {}

    def penalty(self, state: State, parameters: Tensors) -> Tensor:
        """The explicit penalty at `parameters`, without the strength."""
        return next(iter(parameters.values())).new_zeros(())

    def consolidate(self, state: State, parameters: Tensors, omega: Tensors) -> State:
        """The state after a task that ended at `parameters`, with the importances `omega` measured on it."""
        return state

    def anchor(self, state: State, parameters: Tensors, step: Tensors) -> dict[str, Tensor]:
        """The parameters after an implicit step of the penalty, `step` (0-d or per entry) being the step size times the strength."""
        return {}

    def observe(self, state: State, before: Tensors, after: Tensors, gradients: Tensors) -> State:
        """The state after one optimizer step from `before` to `after`, `gradients` being the task loss's at `before`."""
        return state


@dataclass(frozen=True)
class NoPreserver(Preserver):
    """Plain fine-tuning: nothing is kept."""

    name: ClassVar[str] = "none"
    strength: float = 0.0


def widened(parameter: Tensor) -> Tensor:
    """A detached copy in at least float32: importances and anchors outlive many small steps."""
    copy = parameter.detach().clone()
    return copy.float() if copy.dtype in (torch.float16, torch.bfloat16) else copy
