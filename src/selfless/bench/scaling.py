"""How cost grows (part "fleet"): a step with the width and with the tasks before it, importance with the samples.

How a step grows with the size of the fleet is in `steps`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from selfless.bench.engine import EngineFleet, mlp
from selfless.bench.limits import limit_of
from selfless.bench.plan import Plan
from selfless.bench.table import Row, format_number, make_row
from selfless.bench.timing import free_bytes, time_call, time_in_turn


def run(plan: Plan) -> Iterator[Row]:
    """Yield the rows by width, by tasks and by samples."""
    yield from _rows_by_width(plan)
    yield from _rows_by_tasks(plan)
    yield from _rows_by_samples(plan)


def _rows_by_width(plan: Plan) -> Iterator[Row]:
    """Time a step of MAS + SLNID at each width, in each fleet of `importance_fleets`."""
    samples = plan.batch * (100 if plan.device.type == "cuda" else 5)
    for members in plan.importance_fleets:
        first = 0.0
        for n in plan.step_widths:
            title = f"step, width {n:,}, fleet of {members}"
            plan.say(title)
            if 40 * members * (n * n + 794 * n) > free_bytes(plan.device):  # ten float32 numbers per parameter: θ, momentum, Ω, θ*, …
                yield make_row(title, says="does not fit in memory", kind="width", n=n, members=members)
                continue
            try:
                fleet = EngineFleet(mlp(n), members, samples, plan.device, batch=plan.batch)
                limit = limit_of(mlp(n), members, plan.batch, plan.device)
                times = time_in_turn({"step": fleet.train_epoch, "limit": limit}, plan.rounds, plan.device)
            except torch.cuda.OutOfMemoryError:
                yield make_row(title, says="out of memory", kind="width", n=n, members=members)
                continue
            step = times.best("step") / fleet.steps
            first = first or step
            growth = format_number(_parameters(n) / _parameters(plan.step_widths[0]))
            says = f"{format_number(step / first)}× that of width {plan.step_widths[0]}, with {growth}× the parameters"
            figures: dict[str, Any] = {"n": n, "members": members, "steps": fleet.steps, "rounds": times.rounds}
            figures["of_limit"] = times.best("limit") / step
            yield make_row(title, step, rate=f"{format_number(members / step)} run-steps/s", says=says, kind="width", **figures)
            del fleet, limit  # before the next, larger ones are made


def _parameters(n: int) -> int:
    """Return the number of parameters of an MLP 784-N-N-10."""
    return n * n + 796 * n + 10


def _rows_by_tasks(plan: Plan) -> list[Row]:
    """Time a step after 1, 2, … tasks. Ω and α are sums over tasks, so it should cost the same. Every round learns all tasks again."""
    members, samples = plan.importance_fleets[-1], plan.sample_counts[len(plan.sample_counts) // 2]
    plan.say(f"steps after 1 to {plan.tasks} tasks, fleet of {members}")
    seconds: dict[int, list[float]] = {t: [] for t in range(1, plan.tasks + 1)}
    for _ in range(plan.rounds):
        fleet = EngineFleet(mlp(), members, samples, plan.device, batch=plan.batch, tasks_before=0)
        for rounds in seconds.values():
            fleet.begin_next_task()
            fleet.train_epoch()  # not timed: on a GPU it captures the step as a CUDA graph
            rounds.append(time_call(fleet.train_epoch, plan.device) / fleet.steps)
    rows = []
    for t, rounds in seconds.items():
        ratio = min(rounds) / min(seconds[1])
        title = f"step after {t} task{'s' * (t > 1)}, {mlp().title}, fleet of {members}"
        figures: dict[str, Any] = {"kind": "tasks", "tasks": t, "members": members, "times_first": ratio, "rounds": rounds}
        rows.append(make_row(title, min(rounds), says=f"{ratio:.2f} of that after one" if t > 1 else "", **figures))
    return rows


def _rows_by_samples(plan: Plan) -> list[Row]:
    """Time the importance pass over more and more samples."""
    members = plan.importance_fleets[-1]
    plan.say(f"importance by the number of samples, fleet of {members}")
    fleets = {n: EngineFleet(mlp(), members, n, plan.device, batch=plan.batch) for n in plan.sample_counts}
    times = time_in_turn({str(n): fleet.consolidate for n, fleet in fleets.items()}, plan.rounds, plan.device)
    rows = []
    for n in plan.sample_counts:
        seconds = times.best(str(n))
        title = f"importance of {n:,} samples, {mlp().title}, fleet of {members}"
        says = f"{1e6 * seconds / n / members:.2f} µs a sample and run"
        figures: dict[str, Any] = {"kind": "samples", "samples": n, "members": members, "rounds": times.rounds[str(n)]}
        rows.append(make_row(title, seconds, rate=f"{format_number(members * n / seconds)} samples/s", says=says, **figures))
    return rows
