"""The model as a task is evaluated: with other parameters or gates than the trained ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from selfless.keeper.part import Part


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
def write(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Set parameters to values, in place."""
    for name, value in values.items():
        parameters[name].copy_(value)
