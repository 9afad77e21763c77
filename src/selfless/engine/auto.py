"""Strengths "auto" of a fleet: λ of every member from the size of its own term in the first task (`selfless.functional.scale`).

The tensors are written in place, because a CUDA graph contains their addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from selfless.engine.inhibition import Slot
from selfless.functional.scale import Scale, complete, follow, scaled_strength, settle, start_scale


class AutoStrengths:
    """The scale of each slot in which a member has a sparsifier with strength "auto", and the λ that follow from it."""

    def __init__(self, slots: Sequence[Slot], device: torch.device) -> None:
        numbers = [k for k, slot in enumerate(slots) if any(kind.is_auto for kind in slot.kinds)]
        self.shares = {k: torch.tensor([kind.share if kind.is_auto else 0.0 for kind in slots[k].kinds], device=device) for k in numbers}
        self.scales: dict[int, Scale] = {k: start_scale(share) for k, share in self.shares.items()}
        self.is_open = bool(self.scales)  # True until the first task has ended

    def follow(self, slot: int, sizes: Tensor, trains: Tensor) -> None:
        """Take over R (F,) of the members that still train, in a step of the first task."""
        old = self.scales[slot]
        self._write(slot, {name: torch.where(trains, new, old[name]) for name, new in follow(old, sizes).items()})

    def end_task(self) -> None:
        """Settle the scales at the end of the first task; later calls change nothing."""
        for slot, scale in self.scales.items():
            self._write(slot, settle(scale))
        self.is_open = False

    def strengths(self, slot: int) -> Tensor:
        """λ of every member (F,); 0 for members with a number as strength, and until R has settled."""
        return self.shares[slot] * scaled_strength(self.scales[slot], 1.0)

    def tensors(self) -> dict[str, Tensor]:
        """Return the scales as flat named tensors."""
        return {f"scale.sparsify.{k}.{name}": t for k, scale in self.scales.items() for name, t in scale.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        for k, scale in self.scales.items():
            self._write(k, complete({name: tensors[key] for name in scale if (key := f"scale.sparsify.{k}.{name}") in tensors}))
        self.is_open = any(not bool(scale["ended"].all()) for scale in self.scales.values())

    def _write(self, slot: int, new: Scale) -> None:
        for name, value in new.items():
            self.scales[slot][name].copy_(value)
