"""Old method names of the keeper, kept for one release."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn


class OldNames:
    """`turn`, `as_task` and `draw_gates`, with a DeprecationWarning."""

    begin_epoch: Any
    evaluating: Any
    parts: Any

    def turn(self, epoch: int, epochs: int, batches: int | None = None) -> None:
        """Deprecated: `begin_epoch`."""
        warnings.warn("keeper.turn is now keeper.begin_epoch", DeprecationWarning, stacklevel=2)
        self.begin_epoch(epoch, epochs, batches)

    def as_task(self, task: int) -> AbstractContextManager[nn.Module]:
        """Deprecated: `evaluating`."""
        warnings.warn("keeper.as_task is now keeper.evaluating", DeprecationWarning, stacklevel=2)
        found: AbstractContextManager[nn.Module] = self.evaluating(task)
        return found

    def draw_gates(self, noise: Tensor) -> None:
        """Deprecated: the gates of a task are drawn with torch, so seed torch instead."""
        warnings.warn(
            "keeper.draw_gates will be removed: seed torch before the first begin_epoch of a task instead", DeprecationWarning, stacklevel=2
        )
        for part in self.parts:
            part.draw_noise = lambda _: noise.flatten()
