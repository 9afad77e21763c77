"""How much room is left: the free parameters and neurons of each layer.

A parameter is free while its importance Ω, summed over the tasks so far, is below a threshold, a neuron while its α is. The threshold is
1e-2, the paper's (its figure 4, top); it belongs to the scale of Ω, so compare capacities of one method and network, not across them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

THRESHOLD = 1e-2


@dataclass(frozen=True)
class Free:
    """So many of so many are free."""

    free: int
    total: int

    @property
    def share(self) -> float:
        """NaN of nothing: a method without importances knows of no room."""
        return self.free / self.total if self.total else math.nan

    def __str__(self) -> str:
        return f"{self.free:,} of {self.total:,} ({100 * self.share:.1f} %)"


@dataclass(frozen=True)
class Capacity:
    """Free parameters by parameter name, free neurons by layer name, after `tasks` tasks. `print` it for a table."""

    parameters: dict[str, Free]
    neurons: dict[str, Free]
    tasks: int
    threshold: float = THRESHOLD

    @property
    def free_parameters(self) -> float:
        """The share of all parameters that are free."""
        return _together(self.parameters).share

    @property
    def free_neurons(self) -> float:
        """The share of the watched neurons that are free."""
        return _together(self.neurons).share

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {
            "tasks": self.tasks,
            "threshold": self.threshold,
            "free_parameters": None if math.isnan(self.free_parameters) else self.free_parameters,
            "free_neurons": None if math.isnan(self.free_neurons) else self.free_neurons,
            "parameters": {name: f.share for name, f in self.parameters.items()},
            "neurons": {name: f.share for name, f in self.neurons.items()},
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"free after {self.tasks} task{'s' * (self.tasks != 1)} (importance < {self.threshold:g})"
        width = max((len(name) for name in (*self.neurons, *self.parameters)), default=3)
        for title, rows in (("neurons", self.neurons), ("parameters", self.parameters)):
            for name, free in rows.items():
                yield f"  {title:<10}  {name:<{width}}  {free}"
            if len(rows) > 1:
                yield f"  {title:<10}  {'all':<{width}}  {_together(rows)}"


def _together(rows: Mapping[str, Free]) -> Free:
    return Free(sum(f.free for f in rows.values()), sum(f.total for f in rows.values()))


def free_share(importance: Tensor, threshold: float = THRESHOLD) -> Free:
    """How many entries lie below the threshold."""
    return Free(int((importance < threshold).sum()), importance.numel())
