"""A forward hook that belongs to one keeper, and a test for passes that activation checkpointing repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Hook:
    """A hook that does nothing in copies and pickles of the model, which the keeper does not watch."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args) if self.call is not None else None

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


def is_forward_pass() -> bool:
    """Return False if activation checkpointing repeats the pass inside backward."""
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1


def stop_hooks(*owners: Any) -> None:
    """Remove the hooks of objects that have some; None is passed over."""
    for owner in owners:
        if owner is not None:
            owner.stop()
