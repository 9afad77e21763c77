"""The capacity of every member after a task: free parameters and neurons, the neurons that the task uses, and its activations.

A record holds the set of neurons of each task, so that the sets of earlier tasks need no state of their own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from selfless.capacity.activity import SUMS, Activity, observe, rows_of
from selfless.capacity.counts import Capacity, count_free_of_members
from selfless.capacity.measuring import SAMPLES
from selfless.capacity.rooms import counts_of, pack, rooms_of_members, task_sets
from selfless.engine.fleet import Fleet
from selfless.engine.stack import Tensors
from selfless.preserve.base import importance_of

SHARE, LEAST, AT_ONCE = 20, 100, 500  # read at most 1/20 of the samples that training saw, but 100; 500 in one pass


def add_capacity(fleet: Fleet, entries: list[list[dict[str, Any]]]) -> None:
    """Add the capacity of every member after its newest task to its list of recorded entries."""
    omega = importance_of([part.term for part in fleet.parts], fleet.states) or {}
    activity, alpha = measure_activity(fleet), fleet.task_alpha
    sets = task_sets(alpha, activity)
    earlier = [sum("sets" in entry for entry in recorded) for recorded in entries]  # a continued run may have tasks without sets
    layers = rooms_of_members(sets, [counts_of(recorded) for recorded in entries], earlier, activity)
    parameters = {n: count_free_of_members(o) for n, o in omega.items()}
    neurons = {n: count_free_of_members(a) for n, a in fleet.alpha.items()}
    for m, recorded in enumerate(entries):
        free, idle = ({n: members[m] for n, members in counts.items()} for counts in (parameters, neurons))
        found = Capacity(free, idle, fleet.tasks, layers=layers[m]).as_dict()
        own = {kind: {name: members[m] for name, members in named.items()} for kind, named in sets.items()}
        recorded.append(found | ({"sets": pack(own)} if layers[m] else {}))


@torch.no_grad()
def measure_activity(fleet: Fleet) -> dict[str, Activity]:
    """Return {layer: the activity of all members, stacked} on samples of the newest task, evenly spaced, as that task is evaluated."""
    stack, data = fleet.stack, fleet.step.data
    if not stack.layers:
        return {}
    other: Tensors = {}
    for part in fleet.parts:
        other |= part.evaluated_parameters(fleet.tasks - 1, fleet.tasks)
        part.close_gates(fleet.tasks - 1, fleet.tasks)
    found: dict[str, Activity] = {}
    size = min(fleet.at_once(data), AT_ONCE)
    stack.module.eval()
    for rows in _rows(fleet).split(size, 1):
        x = data.batch(rows, fleet.still)[0].to(fleet.step.dtype)
        with fleet.step.precision():
            run = stack.outputs if other else stack.forward
            hidden = run(fleet.params | other, fleet.buffers, x)[1]
        for name, h in zip(stack.layers, hidden, strict=True):
            each = rows_of(h, 2 if h.dim() > 4 else -1)
            new = observe(each) if h.is_cuda else _stack([observe(one) for one in each])  # a GPU needs few large sums
            found[name] = found[name] + new if name in found else new
    return found


def _stack(members: list[Activity]) -> Activity:
    """Return the sums of some members as one value with a leading axis."""
    return Activity(members[0].rows, *(torch.stack([getattr(one, name) for one in members]) for name in SUMS))


def _rows(fleet: Fleet) -> Tensor:
    """Return the rows to read of every member's task, (F, S). A blurred task has weights: its rows are drawn by them."""
    data = fleet.step.data
    count = min(data.n, SAMPLES, max(LEAST, math.ceil(data.n * fleet.run.epochs / SHARE)))
    if data.weights is not None:
        return data.order(fleet.seeds, fleet.tasks - 1, fleet.run.epochs)[:, :count]
    rows = torch.linspace(0, data.n - 1, count, device=fleet.device, dtype=torch.float64).round().long()
    return rows.expand(fleet.size, -1)
