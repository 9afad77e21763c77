"""A forward hook that belongs to one keeper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Hook:
    """A forward hook that belongs to one keeper: copies and pickles of the model carry an inert one instead."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args) if self.call is not None else None

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


def _forward() -> bool:
    """Whether this is a forward pass of its own, not one that activation checkpointing repeats inside backward."""
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1
