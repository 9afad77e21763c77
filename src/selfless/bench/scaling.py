"""How cost grows: a step with the width and with the tasks behind it, importance with the samples (with the fleet: `steps`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from selfless.bench.plan import Plan
from selfless.bench.rig import Rig, mlp
from selfless.bench.rows import Row, many, row
from selfless.bench.timing import clocked, free_bytes, interleaved


def run(plan: Plan) -> Iterator[Row]:
    yield from _width(plan)
    yield from _tasks(plan)
    yield from _samples(plan)


def _width(plan: Plan) -> Iterator[Row]:
    """A step of MAS + SLNID by width, alone and in the largest fleet whose importance is measured."""
    samples = plan.batch * (100 if plan.device.type == "cuda" else 5)
    for members in plan.measured:
        first = 0.0
        for n in plan.scaled:
            title = f"step, width {n:,}, fleet of {members}"
            plan.say(title)
            if 40 * members * (n * n + 794 * n) > free_bytes(plan.device):  # parameters, momentum, gradient, Ω, θ*, shares, products
                yield row(title, says="does not fit in memory", kind="width", n=n, members=members)
                continue
            try:
                rig = Rig(mlp(n), members, samples, plan.device, batch=plan.batch)
                times = interleaved({"step": rig.epoch}, plan.rounds, plan.device)
            except torch.cuda.OutOfMemoryError:
                yield row(title, says="out of memory", kind="width", n=n, members=members)
                continue
            step = times.best("step") / rig.steps
            first = first or step
            says = f"{many(step / first)}× that of width {plan.scaled[0]}, with {many(_size(n) / _size(plan.scaled[0]))}× the parameters"
            figures: dict[str, Any] = {"n": n, "members": members, "steps": rig.steps, "rounds": times.rounds}
            yield row(title, step, rate=f"{many(members / step)} run-steps/s", says=says, kind="width", **figures)
            del rig


def _size(n: int) -> int:
    return n * n + 796 * n + 10


def _tasks(plan: Plan) -> list[Row]:
    """A step after 1, 2, … tasks: Ω and α are one sum over tasks, so it should cost the same. Every round learns them all anew."""
    members, samples = plan.measured[-1], plan.amounts[len(plan.amounts) // 2]
    plan.say(f"steps after 1 to {plan.tasks} tasks, fleet of {members}")
    seconds: dict[int, list[float]] = {t: [] for t in range(1, plan.tasks + 1)}
    for _ in range(plan.rounds):
        rig = Rig(mlp(), members, samples, plan.device, batch=plan.batch, learned=0)
        for spent in seconds.values():
            rig.next()
            rig.epoch()  # records the step where there is a GPU
            spent.append(clocked(rig.epoch, plan.device) / rig.steps)
    rows = []
    for t, spent in seconds.items():
        ratio = min(spent) / min(seconds[1])
        title = f"step after {t} task{'s' * (t > 1)}, {mlp().title}, fleet of {members}"
        figures: dict[str, Any] = {"kind": "tasks", "tasks": t, "members": members, "times_first": ratio, "rounds": spent}
        rows.append(row(title, min(spent), says=f"{ratio:.2f} of that after one" if t > 1 else "", **figures))
    return rows


def _samples(plan: Plan) -> list[Row]:
    """The importance pass over more and more samples."""
    members = plan.measured[-1]
    plan.say(f"importance by the number of samples, fleet of {members}")
    rigs = {n: Rig(mlp(), members, n, plan.device, batch=plan.batch) for n in plan.amounts}
    times = interleaved({str(n): rig.consolidate for n, rig in rigs.items()}, plan.rounds, plan.device)
    rows = []
    for n in plan.amounts:
        spent = times.best(str(n))
        title = f"importance of {n:,} samples, {mlp().title}, fleet of {members}"
        says = f"{1e6 * spent / n / members:.2f} µs a sample and run"
        figures: dict[str, Any] = {"kind": "samples", "samples": n, "members": members, "rounds": times.rounds[str(n)]}
        rows.append(row(title, spent, rate=f"{many(members * n / spent)} samples/s", says=says, **figures))
    return rows
