"""A parameter whose closed form waits, during a backward pass, until the gradients at all of its uses are there."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from selfless.importance.graph import Place, Use, apply_views
from selfless.importance.loop import Sums, add_sum
from selfless.importance.uses import Part, has_only_transposes, part_of, read_saved, total


@dataclass(frozen=True)
class Pass:
    """One backward pass: the number of samples, p, the factors of g_m that give w_m, and whether the graph is needed again."""

    count: int
    power: int
    rows: Tensor | None
    retain: bool


@dataclass
class WaitingParameter:
    """A parameter with a closed form by its uses: it waits until δ of each use is there."""

    name: str
    shape: torch.Size
    uses: list[Use]
    layouts: list[str]
    now: Pass
    memory: int
    omega: Sums
    parts: list[tuple[Use, Part]] = field(default_factory=list)
    of_view: Tensor | None = None

    def __post_init__(self) -> None:
        for use in self.uses:
            read_saved(use)

    def places(self) -> list[Place]:
        return [(use.edge, partial(self._receive, use, layout)) for use, layout in zip(self.uses, self.layouts, strict=True)]

    def _receive(self, use: Use, layout: str, delta: Tensor) -> None:
        part = part_of(use, self.shape, delta, layout, self.now.count, self.now.rows)
        assert part is not None
        self.parts.append((use, part))
        if len(self.parts) == len(self.uses):
            self._add()

    def _add(self) -> None:
        """Add Σ_m |g_m|ᵖ to `omega`, or keep that of a view: autograd cannot run the backward pass of a view inside another one."""
        value, self.parts = total(self.parts, self.now.count, self.now.power, self.memory), []
        for use in self.uses if not self.now.retain else ():
            use.forget()
        if self.views:
            self.of_view = value
        else:
            add_sum(self.omega, self.name, value)

    @property
    def views(self) -> tuple[Any, ...]:
        return () if has_only_transposes(self.uses) else self.uses[0].views

    def finish(self) -> None:
        """Add what is left after the backward pass. A use that the values do not depend on has no δ."""
        if self.parts:
            self._add()
        if self.of_view is not None:
            add_sum(self.omega, self.name, apply_views(self.views, self.of_view))
