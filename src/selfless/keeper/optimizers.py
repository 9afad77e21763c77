"""Tell keepers of every optimizer step.

One hook serves all keepers and stays: a hook for each keeper would be removed when that keeper is garbage-collected, perhaps in the middle
of a step that goes through the hooks.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Stepped(Protocol):
    """Whoever wants to know of optimizer steps."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None: ...


_WATCHING: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_optimizers(keeper: Stepped) -> None:
    """Call keeper.after_step after every step of any optimizer, without keeping the keeper alive."""
    _register_once()
    _WATCHING.add(keeper)


def forget_optimizers(keeper: Stepped) -> None:
    """Call it no more."""
    _WATCHING.discard(keeper)


@cache
def _register_once() -> None:
    register_optimizer_step_post_hook(_after_any_step)


def _after_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for keeper in list(_WATCHING):
        keeper.after_step(optimizer)
