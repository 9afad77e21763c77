"""The room of a keeper: which neurons each task uses, counted, and what the activations of the last task are like.

The counts have the size of the layers, whatever the number of tasks. `consolidate` reads the first samples of the task once more for them,
without gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from selfless.capacity.activity import MOST_PAIRS, SUMS, Activity
from selfless.capacity.measuring import ROWS, SAMPLES, Peeked, measure_activity
from selfless.capacity.rooms import LayerRoom, Sets, add_sets, rooms, task_sets
from selfless.distributed import Ranks
from selfless.distributed.shards import fsdp_modules
from selfless.keeper.activations import Collector
from selfless.network.calling import Forward
from selfless.network.layers import Tap


@dataclass(frozen=True)
class Room:
    """Counts of tasks by neuron, of `tasks` tasks, and the rooms of the layers after the last one (empty after loading a state)."""

    counts: Sets = field(default_factory=dict)
    tasks: int = 0
    layers: dict[str, LayerRoom] = field(default_factory=dict)

    def after(self, alpha: Mapping[str, Tensor], activity: Mapping[str, Activity]) -> Room:
        """Return the room after one more task with this α and activity."""
        sets = task_sets(alpha, activity)
        return Room(add_sets(self.counts, sets), self.tasks + 1, rooms(sets, self.counts, self.tasks, activity))

    def tensors(self) -> dict[str, Tensor]:
        """Return the counts as flat named tensors, {"KIND.LAYER", "tasks"}; none before the first task."""
        flat = {f"{kind}.{name}": c for kind, named in self.counts.items() for name, c in named.items()}
        return flat | {"tasks": torch.tensor(self.tasks)} if flat else {}

    @classmethod
    def of_tensors(cls, flat: Mapping[str, Tensor]) -> Room:
        """Return the room that `tensors` made flat."""
        counts: Sets = {}
        for key, tensor in flat.items():
            kind, dot, name = key.partition(".")
            if dot:
                counts.setdefault(kind, {})[name] = tensor.cpu()
        return cls(counts, int(flat["tasks"]) if "tasks" in flat else 0)


def grown(
    room: Room, alpha: Mapping[str, Tensor], new: Mapping[str, Tensor], activity: Mapping[str, Activity]
) -> tuple[Room, dict[str, Tensor]]:
    """Return the room and α after one more task with this α and activity. Raise ValueError for a layer that was resized."""
    widths = {name: len(one.rate) for name, one in activity.items()} | {name: len(a) for name, a in new.items()}
    for known in (alpha, *room.counts.values()):
        for name, width in widths.items():
            if name in known and len(known[name]) != width:
                raise ValueError(
                    f"layer {name!r} had {len(known[name])} neurons at the end of the last task and has {width} now; do not resize a "
                    "layer, add a new one to the model"
                )
    return room.after(new, activity), {**alpha, **{name: alpha[name] + a if name in alpha else a for name, a in new.items()}}


def most_pairs(model: nn.Module, layers: int) -> int:
    """Return how many neurons of a layer enter the sums over pairs, 32 to 1024: about one sum for 16 parameters of the model."""
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return min(MOST_PAIRS, max(32, math.isqrt(size // (16 * max(layers, 1)))))


def activity_bytes(model: nn.Module, taps: Mapping[str, Tap]) -> int:
    """Return the bytes of the sums that `look` returns, by the sizes of the layers' weights."""
    if fsdp_modules(model):
        return 0
    most = most_pairs(model, len(taps))
    weights = [getattr(tap.module, "weight", None) for tap in taps.values()]  # None: an activation, whose width is not known here
    widths = [len(weight) if isinstance(weight, Tensor) and weight.dim() else most for weight in weights]
    return sum(8 * (min(width, most) ** 2 + 4 * width) for width in widths)  # float64: pairs, and four sums for each neuron


def look(
    model: nn.Module, collector: Collector, batches: Iterable[Any], forward: Forward | None
) -> tuple[dict[str, Activity], Iterable[Any]]:
    """Return the activity of the layers on the first samples of a task, and the batches to read from then on.

    With FSDP2 nothing is read: forward passes there need the same number of batches on every rank.
    """
    if not collector.taps or fsdp_modules(model):
        return {}, batches
    peeked = Peeked(batches, SAMPLES)
    collector.complete_taps(peeked.first, forward)
    most = most_pairs(model, len(collector.taps))
    return measure_activity(model, peeked.first, collector.taps, forward, most, ROWS), peeked


def over_ranks(found: dict[str, Activity], ranks: Ranks, model: nn.Module) -> dict[str, Activity]:
    """Return the sums over the samples of all ranks. Call it when every rank is known to have batches."""
    return found if ranks.is_alone else {name: _sum(one, ranks, next(model.parameters()).device) for name, one in found.items()}


def _sum(one: Activity, ranks: Ranks, device: torch.device) -> Activity:
    tensors = [getattr(one, name).to(device) for name in SUMS]
    ranks.sum_(tensors)
    return Activity(ranks.count(one.rows, device), *(t.cpu() for t in tensors))
