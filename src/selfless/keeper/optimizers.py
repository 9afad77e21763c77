"""Call every keeper before and after each optimizer step.

One hook serves all keepers and is never removed. A hook per keeper would be removed when the keeper is garbage-collected, which can happen
while an optimizer step iterates over its hooks.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from selfless.keeper.evaluation import project_again


class StepListener(Protocol):
    """An object that is called before and after optimizer steps."""

    model: nn.Module
    parts: Any  # its preservers; each is called before optimizer steps

    def after_step(self, optimizer: torch.optim.Optimizer) -> None: ...


MOST_OPEN = 16  # steps inside of steps
_LISTENERS: weakref.WeakSet[Any] = weakref.WeakSet()
_LOCAL = threading.local()  # .steps: of each optimizer whose step has begun its id, and the parameters of the steps inside of it


def _open_steps() -> list[tuple[int, set[int]]]:
    """Return the optimizers of this thread whose step has begun and not ended, the outermost first."""
    if not hasattr(_LOCAL, "steps"):
        _LOCAL.steps = []
    found: list[tuple[int, set[int]]] = _LOCAL.steps
    return found


def watch_optimizers(keeper: StepListener) -> None:
    """Call keeper.after_step, and before_step of its parts, at every step of any optimizer. The reference to the keeper is weak."""
    _register_once()
    _LISTENERS.add(keeper)


def warn_second_keeper(model: nn.Module) -> None:
    """Warn if a keeper is already attached to this model."""
    if any(keeper.model is model for keeper in list(_LISTENERS)):
        warnings.warn(
            "this model already has a keeper, and its penalty still counts: call detach() on the old one first, or attach one keeper with "
            "a sum of terms, as in preserve=one + other",
            stacklevel=4,
        )


def forget_optimizers(keeper: StepListener) -> None:
    """Stop calling the keeper and its parts."""
    _LISTENERS.discard(keeper)


@cache
def _register_once() -> None:
    register_optimizer_step_pre_hook(_before_any_step)
    register_optimizer_step_post_hook(_after_any_step)


def _before_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    steps = _open_steps()
    del steps[:-MOST_OPEN]  # steps that raised an error have left their entries
    steps.append((id(optimizer), set()))
    for keeper in list(_LISTENERS):
        for part in keeper.parts:
            part.before_step(optimizer)


def _after_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    steps = _open_steps()
    done = set[int]()
    while steps and (entry := steps.pop()):
        if entry[0] == id(optimizer):
            done = entry[1]
            break
    own = {id(p) for group in optimizer.param_groups for p in group["params"]} if done or steps else set[int]()
    if steps:
        steps[-1][1].update(own)
    if done and own <= done:  # it wraps optimizers: keepers have followed the steps of those, whose state has the step sizes
        for keeper in list(_LISTENERS):
            if any(id(p) in own for p in keeper.model.parameters() if p.requires_grad):
                project_again(keeper)
        return
    for keeper in list(_LISTENERS):
        keeper.after_step(optimizer)
