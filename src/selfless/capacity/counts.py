"""Capacity: how many parameters and neurons of each layer are free.

    parameter k is free  ⇔  Ω_k < τ,      neuron i is free  ⇔  α_i < τ,

with Ω and α summed over the tasks learnt so far. The threshold τ is 1e-2, as in the paper (its figure 4, top). It belongs to the scale of
Ω: compare capacities of one method and one network, not across methods or networks. The sets of `selfless.capacity.sets` are free of scale.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from selfless.capacity.rooms import LayerRoom, whole

THRESHOLD = 1e-2
REASONS = {"neurons": "no layer is attached", "parameters": "no preserver measures their importance"}
EARLY = "consolidate() measures them when a task ends"


@dataclass(frozen=True)
class Free:
    """How many entries are free, out of how many."""

    free: int
    total: int

    @property
    def share(self) -> float:
        """free / total. NaN if total = 0: where no importance is measured, it is not known what is free."""
        return self.free / self.total if self.total else math.nan

    def __str__(self) -> str:
        return f"{self.free:,} of {self.total:,} ({100 * self.share:.1f} %)"


@dataclass(frozen=True)
class Capacity:
    """Free parameters by parameter name and free neurons by layer name, after `tasks` tasks. Print it to see a table.

    layers    by layer: used, free and shared neurons, sparsity, correlation, rank (`LayerRoom`); empty where no task's data were read
    """

    parameters: dict[str, Free]
    neurons: dict[str, Free]
    tasks: int
    threshold: float = THRESHOLD
    layers: dict[str, LayerRoom] = field(default_factory=dict)

    @property
    def network(self) -> LayerRoom | None:
        """All layers together; None where no task's data were read."""
        return whole(self.layers)

    @property
    def free_parameters(self) -> float:
        """Σ free / Σ total over all parameters. NaN if their importance is not measured, as without a preserver."""
        return _sum(self.parameters).share

    @property
    def free_neurons(self) -> float:
        """Σ free / Σ total over all neurons of the attached layers. NaN without such layers."""
        return _sum(self.neurons).share

    def as_dict(self) -> dict[str, object]:
        """Return plain values for JSON; None stands for NaN."""
        more = {name: room.as_dict() for name, room in self.layers.items()}
        total = self.network
        return {
            "tasks": self.tasks,
            "threshold": self.threshold,
            "free_parameters": None if math.isnan(self.free_parameters) else self.free_parameters,
            "free_neurons": None if math.isnan(self.free_neurons) else self.free_neurons,
            "parameters": {name: f.share for name, f in self.parameters.items()},
            "neurons": {name: f.share for name, f in self.neurons.items()},
        } | ({} if total is None else {"layers": more, "network": total.as_dict()})

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        total, tasks = self.network, f"{self.tasks} task{'s' * (self.tasks != 1)}"
        if total is not None and (use := total.use.get("importance")) is not None:
            yield f"after {tasks} {use.free} of {use.total} neurons are free: no task has them among those with 90 % of the importance"
        if total is not None:
            yield from describe_rooms(self.layers | ({"all": total} if len(self.layers) > 1 else {}))
        yield f"free after {tasks} by the paper's threshold: importance < {self.threshold:g}, whose scale depends on network and method"
        width = max((len(name) for name in (*self.neurons, *self.parameters)), default=3)
        for title, rows in (("neurons", self.neurons), ("parameters", self.parameters)):
            if not rows:
                is_early = title == "neurons" and not self.tasks
                yield f"  {title:<10}  not measured{f' yet: {EARLY}' if is_early else f': {REASONS[title]}'}"
            for name, free in rows.items():
                yield f"  {title:<10}  {name:<{width}}  {free}"
            if len(rows) > 1:
                yield f"  {title:<10}  {'all':<{width}}  {_sum(rows)}"


def describe_rooms(rooms: Mapping[str, LayerRoom]) -> Iterator[str]:
    """Yield a table of rooms: neurons by α (90 % of its sum) and by firing, and what the activations of the last task are like."""
    width = max(len(name) for name in rooms)
    for kind, title in (("importance", "by α: those with 90 % of its sum"), ("firing", "by firing: in 5 % of samples")):
        yield f"{'neurons ' + title:<{width + 2}}"
        for name, room in rooms.items():
            use = room.use.get(kind)
            if use is not None:
                against = f"  overlap {100 * use.overlap:.0f} %, chance {100 * use.chance:.0f} %" if use.earlier and use.now else ""
                counts = f"free {use.free}  used {use.used}  shared {use.shared}  this task {use.now}, new {use.new}"
                yield f"  {name:<{width}}  {counts}{against}"
    yield "activations of the last task"
    for name, room in rooms.items():
        yield (
            f"  {name:<{width}}  dead {room.dead}  active {100 * room.active:.0f} %  lifetime {room.lifetime:.2f}  "
            f"population {room.population:.2f}  correlation {room.correlation:.2f}  rank {room.rank:.1f} of {room.neurons}"
        )


def check_threshold(threshold: Any) -> None:
    """Raise an error unless the threshold τ is a number ≥ 0."""
    if isinstance(threshold, bool) or not isinstance(threshold, numbers.Real) or not float(threshold) >= 0:
        raise ValueError(
            f"capacity({threshold!r}): the threshold must be a number ≥ 0, such as {THRESHOLD}; what is less important is free"
        )


def _sum(rows: Mapping[str, Free]) -> Free:
    return Free(sum(f.free for f in rows.values()), sum(f.total for f in rows.values()))


def count_free(importance: Tensor, threshold: float = THRESHOLD) -> Free:
    """#{k : Ω_k < τ} and the number of entries k, for importances Ω of any shape."""
    return Free(int((importance < threshold).sum()), importance.numel())


def count_free_of_members(importance: Tensor, threshold: float = THRESHOLD) -> list[Free]:
    """Return `count_free` of every member of a fleet, for importances (F, …). This waits for the device once."""
    free = (importance < threshold).flatten(1).sum(1).tolist()
    return [Free(count, importance[0].numel()) for count in free]
