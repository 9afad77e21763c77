"""Values of parameters that preservers set: those a task is evaluated with, with its gates, and those after an optimizer step."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfless.keeper.part import Part
from selfless.preserve.capabilities import Evaluates

if TYPE_CHECKING:
    from selfless.keeper.keeper import Keeper


def check_task(task: Any, tasks: int) -> None:
    """Raise an error unless `task` is the number of a task that has ended; before the first one has, 0 is the current one."""
    if isinstance(task, bool) or not isinstance(task, numbers.Integral):
        raise TypeError(f"keeper.evaluating takes the number of a task, counted from 0, not {task!r}; write keeper.evaluating(0)")
    if not 0 <= int(task) < max(tasks, 1):
        raise ValueError(f"task {task} has not ended yet: {tasks} tasks were consolidated so far; count from 0")


def changes_model(parts: Sequence[Part]) -> bool:
    """Return True if evaluating an old task needs other parameters or gates than training."""
    return any(part.gates is not None or isinstance(part.term, Evaluates) for part in parts)


@contextmanager
def evaluated(
    model: nn.Module, parts: Sequence[Part], parameters: Mapping[str, nn.Parameter], task: int, tasks: int
) -> Iterator[nn.Module]:
    """Inside `with`: the model for evaluating task `task` of `tasks` that have ended; before the first one, the model as it is."""
    before: dict[str, Tensor] = {}
    for part in parts:
        other = part.evaluated_parameters(parameters, task) if tasks else {}
        before |= {n: parameters[n].detach().clone() for n in other if n not in before}
        write(parameters, other)
        if part.gates is not None:
            part.gates.follow(part.state, task if tasks else None)
    try:
        yield model
    finally:
        write(parameters, before)
        for part in parts:
            if part.gates is not None:
                part.gates.follow(part.state)


@torch.no_grad()
def finish_step(
    keeper: Keeper, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], names: Mapping[Tensor, str]
) -> None:
    """Apply all that follows a step of the optimizer: anchor and gates, then proximal steps and projections, then the path."""
    if keeper.injector is not None:
        keeper.injector.drop()
    if keeper.tasks and any(part.is_on for part in keeper.parts):
        keeper.notices.check_statistics(keeper.model, keeper.tasks, optimizer)
    for part in keeper.parts:
        part.optimizers.note(optimizer, keeper.implicit)
        if part.drops is not None:
            part.drops.end_step()
        if keeper.implicit and keeper.tasks:
            part.pull(optimizer, parameters, names)
        if part.gates is not None:
            part.step_gates(part.optimizers.largest_rate(names))
    stepped = {names[p] for group in optimizer.param_groups for p in group["params"] if p in names}
    for part in keeper.parts:
        if part.corrects:
            write(parameters, part.proximal_step(optimizer, parameters, names))
            write(parameters, part.project_step(parameters))
            if held := part.project(parameters):  # not what others train: a backward pass in which they step may still read it
                others = part.optimizers.of_others(optimizer)
                write(parameters, {n: value for n, value in held.items() if n in stepped or id(parameters[n]) not in others})
    for part in keeper.parts:
        part.observe(stepped)


def project_again(keeper: Keeper) -> None:
    """Reset what must not change, after an optimizer that wraps another one has changed parameters once more."""
    for part in keeper.parts:
        if part.corrects:
            parameters = keeper.preserved()
            write(parameters, part.project(parameters))


@torch.no_grad()
def write(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> bool:
    """Set parameters to values, in place; return True if there are some."""
    for name, value in values.items():
        parameters[name].copy_(value)
    return bool(values)
