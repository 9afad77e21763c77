"""The room of one layer after a task: its sets of neurons and its activations, as plain values. Layers add up to the network."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from selfless.capacity.activity import Activity
from selfless.capacity.sets import Use, by_firing, by_share, compare_members

MEANS = ("active", "lifetime", "population", "correlation")
SETS = ("importance", "firing")
Sets = dict[str, dict[str, Tensor]]  # {"importance" or "firing": {layer: (N,)}}


@dataclass(frozen=True)
class LayerRoom:
    """One layer, or all of them, after a task.

    use     {"importance", "firing"}: the sets of neurons by α (90 % of its sum) and by firing (5 % of samples); empty without data
    dead    neurons that never fired in this task's samples
    active, lifetime, population, correlation, rank   see `selfless.capacity.activity`; for all layers, means over neurons; rank: a sum
    """

    neurons: int
    use: dict[str, Use] = field(default_factory=dict)
    dead: int = 0
    active: float = math.nan
    lifetime: float = math.nan
    population: float = math.nan
    correlation: float = math.nan
    rank: float = math.nan

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; None stands for NaN."""
        numbers = {name: getattr(self, name) for name in (*MEANS, "rank")}
        plain = {name: v if math.isfinite(v) else None for name, v in numbers.items()}
        return {"neurons": self.neurons, "dead": self.dead} | plain | {name: use.as_dict() for name, use in self.use.items()}


def task_sets(alpha: Mapping[str, Tensor], activity: Mapping[str, Activity]) -> Sets:
    """Return the neurons that a task uses by layer, by importance and by firing; α is that of this task alone."""
    return {
        "importance": {name: by_share(a).cpu() for name, a in alpha.items()},
        "firing": {name: by_firing(one.rate).cpu() for name, one in activity.items()},
    }


def add_sets(counts: Sets, sets: Sets) -> Sets:
    """Return the counts c of tasks by neuron, with one more task."""
    known = {kind: dict(counts.get(kind, {})) for kind in SETS}
    for kind in SETS:
        for name, now in sets[kind].items():
            known[kind][name] = known[kind].get(name, torch.zeros(len(now), dtype=torch.int32)) + now.int()
    return known


def rooms(sets: Sets, counts: Sets, earlier: int, activity: Mapping[str, Activity]) -> dict[str, LayerRoom]:
    """Return the room of each layer after a task with these sets; `counts` are those of `earlier` tasks."""
    one = {kind: {name: now.unsqueeze(0) for name, now in named.items()} for kind, named in sets.items()}
    return rooms_of_members(one, [counts], [earlier], {name: a.as_fleet() for name, a in activity.items()})[0]


def rooms_of_members(
    sets: Sets, counts: Sequence[Sets], earlier: Sequence[int], activity: Mapping[str, Activity]
) -> list[dict[str, LayerRoom]]:
    """Return `rooms` of every member of a fleet, for sets (F, N), the counts and the number of earlier tasks of each, and sums (F, …)."""
    found: list[dict[str, LayerRoom]] = [{} for _ in counts]
    for name in dict.fromkeys((*activity, *sets["importance"])):
        uses = {}
        for kind in SETS:
            if name in sets[kind]:
                now = sets[kind][name]
                known = [own.get(kind, {}).get(name) for own in counts]
                uses[kind] = compare_members(now, torch.stack([torch.zeros(now.shape[1]) if c is None else c for c in known]), earlier)
        measures = activity[name].measures() if name in activity else None
        for m, layers in enumerate(found):
            use = {kind: members[m] for kind, members in uses.items()}
            values = {} if measures is None else {measure: members[m] for measure, members in measures.items()}
            dead = int(values.pop("dead", 0))
            layers[name] = LayerRoom(next(iter(use.values())).total, use, dead, **values)
    return found


def whole(layers: Mapping[str, LayerRoom]) -> LayerRoom | None:
    """Return the room of all layers together; None without layers. A mean is over the neurons of the layers that have the measure."""
    rooms = list(layers.values())
    if not rooms:
        return None

    def mean(measure: str) -> float:
        known = [(room.neurons, value) for room in rooms if not math.isnan(value := getattr(room, measure))]
        return sum(n * value for n, value in known) / sum(n for n, _ in known) if known else math.nan

    shared = [kind for kind in rooms[0].use if all(kind in room.use for room in rooms)]
    use = {kind: functools.reduce(operator.add, (room.use[kind] for room in rooms)) for kind in shared}
    means = {measure: mean(measure) for measure in MEANS}
    return LayerRoom(
        sum(room.neurons for room in rooms), use, sum(room.dead for room in rooms), **means, rank=sum(room.rank for room in rooms)
    )


# ------------------------------------------------------------------------------------------------------------- records
def pack(sets: Sets) -> dict[str, dict[str, str]]:
    """Return sets of neurons as hexadecimal text for a record; the first neuron is the highest bit."""
    return {kind: {name: f"{len(now)}:{_hexadecimal(now)}" for name, now in named.items()} for kind, named in sets.items()}


def unpack(text: Mapping[str, Mapping[str, str]]) -> Sets:
    """Return the sets that `pack` wrote."""
    return {kind: {name: _bits(one) for name, one in named.items()} for kind, named in text.items()}


def _hexadecimal(now: Tensor) -> str:
    bits = "".join("1" if one else "0" for one in now.tolist())
    return f"{int(bits or '0', 2):0{-(-len(bits) // 4)}x}"


def _bits(text: str) -> Tensor:
    size, _, digits = text.partition(":")
    bits = bytearray(f"{int(digits or '0', 16):0{int(size)}b}"[: int(size)], "ascii")
    return torch.frombuffer(bits, dtype=torch.uint8) == ord("1") if bits else torch.zeros(0, dtype=torch.bool)


def counts_of(records: Sequence[Mapping[str, Any]]) -> Sets:
    """Return the counts c of tasks by neuron of all recorded tasks that have sets."""
    counts: Sets = {}
    for entry in records:
        if "sets" in entry:
            counts = add_sets(counts, unpack(entry["sets"]))
    return counts


def overlaps(records: Sequence[Mapping[str, Any]], kind: str = "importance") -> list[list[float]]:
    """Return |U_t ∩ U_s| / √(|U_t||U_s|) for every two recorded tasks, over all layers: 1 for equal sets, NaN if not recorded."""
    rows = []
    for entry in records:
        named = unpack(entry["sets"])[kind] if "sets" in entry else {}
        rows.append(torch.cat(list(named.values())).double() if named else torch.full((1,), math.nan))
    return [[float((a * b).sum() / (a.sum() * b.sum()).sqrt()) if len(a) == len(b) else math.nan for b in rows] for a in rows]
