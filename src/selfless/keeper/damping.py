"""The optimizers that train a model, and their step sizes: how far parameters move in a step, for damped distillation and for gates."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from selfless.keeper.anchor import momentum_of


class Optimizers:
    """The optimizers that took a step in this task or were named to `anchor_with`; at the start of a task, the last one before.

    Those of earlier tasks may still be there, and do not train any more.
    """

    def __init__(self) -> None:
        self._every: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # of all tasks
        self._now: list[weakref.ref[torch.optim.Optimizer]] = []  # of this task, the latest last
        self._is_old = False  # True if `_now` has the last one of the task before
        self._damps = False  # True if the anchor is implicit: then they damp distillation

    def note(self, optimizer: torch.optim.Optimizer, is_anchored: bool) -> None:
        """Note a step; it damps distillation if the anchor is implicit."""
        self._every.add(optimizer)
        if not self._now or self._now[-1]() is not optimizer:
            known = [] if self._is_old else [one for one in self._now if one() is not None and one() is not optimizer]
            self._now = [*known, weakref.ref(optimizer)]
        self._is_old, self._damps = False, is_anchored

    def end_task(self) -> None:
        """Keep the last one, until an optimizer takes a step in the next task."""
        self._now, self._is_old = self._now[-1:], True

    def nominal_steps(self, parameters: Mapping[str, Tensor]) -> tuple[float | None, dict[str, float]]:
        """Return the largest step lr/(1 − μ), with μ the momentum or Adam's β₁, and each parameter's step as a share of it.

        A parameter of several optimizers has the step of the latest one; one of none is taken to have the largest. None without optimizers.
        """
        names, steps = {id(p): name for name, p in parameters.items()}, dict[str, float]()
        for group in self._groups() if self._damps else ():
            step = float(group["lr"]) / (1 - float(momentum_of(group) or group.get("betas", (0.0,))[0]))
            steps |= {names[id(p)]: step for p in group["params"] if id(p) in names}
        largest = max(steps.values(), default=None)
        return largest, {name: step / largest for name, step in steps.items()} if largest else {}

    def sgd_steps(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        """Return for each parameter that SGD trains the largest step along a curvature c that is stable, as 1/c: lr/(2(1 + μ)).

        With Nesterov's momentum it is lr (1 + 2μ)/(2(1 + μ)). Empty until an optimizer has taken a step in this task.
        """
        names, steps = {id(p): name for name, p in parameters.items()}, dict[str, float]()
        for optimizer in () if self._is_old else self._living():
            for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
                momentum = momentum_of(group)
                step = float(group["lr"]) * (1 + 2 * momentum if group.get("nesterov") else 1) / (2 * (1 + momentum))
                steps |= {names[id(p)]: step for p in group["params"] if id(p) in names}
        return steps

    def of_others(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """Return the ids of the parameters that other optimizers train."""
        return {id(p) for other in self._every if other is not optimizer for group in other.param_groups for p in group["params"]}

    def largest_rate(self, names: Mapping[Tensor, str]) -> float | Tensor:
        """Return the largest learning rate of the groups that have parameters of the model: with some frozen the others still learn."""
        rates = [group["lr"] for group in self._groups() if any(p in names for p in group["params"])]
        tensors = [rate for rate in rates if isinstance(rate, Tensor)]
        if not tensors:
            return max(map(float, rates))
        return torch.stack([torch.as_tensor(rate, dtype=torch.float32, device=tensors[0].device).reshape(()) for rate in rates]).max()

    def _groups(self) -> Iterator[dict[str, Any]]:
        """Yield the groups of the optimizers of now, those of the latest one last."""
        for optimizer in self._living():
            yield from optimizer.param_groups

    def _living(self) -> Iterator[torch.optim.Optimizer]:
        """Yield the optimizers of now, the latest one last."""
        yield from (found for one in self._now if (found := one()) is not None)
