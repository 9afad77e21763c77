"""Whole sequences on a GPU, importance and evaluation included: 60 on permuted MNIST at once, and CIFAR-100 alone and in fleets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from selfless.bench.plan import Plan, Unavailable
from selfless.bench.rows import Row, aim, many, row
from selfless.bench.timing import clocked, peak
from selfless.data import DataError, load
from selfless.engine.learner import Learner
from selfless.metrics import spread
from selfless.preserve import MAS
from selfless.sparsify import SLNID, NoSparsifier
from selfless.spec import Precision, Result, Run

CIFAR_FLEETS, PRECISIONS = (1, 8), ("tf32", "bf16")


def run(plan: Plan) -> Iterator[Row]:
    if plan.device.type != "cuda":
        raise Unavailable("whole sequences take minutes to hours on a CPU and are measured on a GPU only: --device cuda")
    try:
        held = [load(name, data_dir=plan.data_dir, download=False) for name in ("mnist", "cifar-100")]  # one copy for all rounds
    except DataError as error:
        raise Unavailable(f"{error}; or: selfless data fetch mnist cifar-100") from error
    yield permuted(plan)
    for members in CIFAR_FLEETS:
        for precision in PRECISIONS:
            yield cifar(plan, members, precision)
    del held


def permuted(plan: Plan) -> Row:
    """60 runs as one fleet: half without a sparsifier, half with SLNID."""
    kinds, seeds = (NoSparsifier(), SLNID(1e-3)), 1 if plan.quick else 30
    base = Run(preserve=MAS(0.01), tasks=2 if plan.quick else 5, epochs=1 if plan.quick else 10)
    runs = [dataclasses.replace(base, sparsify=kind, seed=s) for kind in kinds for s in range(seeds)]
    title = f"{len(runs)} permuted-MNIST runs, {base.tasks} tasks × {base.epochs} epochs, {base.model}"
    return _learnt(plan, title, runs, 1 if plan.quick else 3, limit=(len(runs), 6.0))


def cifar(plan: Plan, members: int, precision: str) -> Row:
    chosen: Precision = "tf32" if precision == "tf32" else "bf16"
    base = Run("split-cifar-100", "cnn-256", MAS(1.0), SLNID(3e-3), lr=0.03, schedule="cosine", precision=chosen)
    base = dataclasses.replace(base, tasks=2 if plan.quick else 10, epochs=1 if plan.quick else 50)
    runs = [dataclasses.replace(base, seed=s) for s in range(members)]
    title = f"CIFAR-100 sequence, {base.tasks} tasks × {base.epochs} epochs, {base.model}, {precision}, fleet of {members}"
    return _learnt(plan, title, runs, 2 if members == 1 and not plan.quick else 1, limit=(1, 8.0 if members == 1 else 4.0))


def _learnt(plan: Plan, title: str, runs: Sequence[Run], rounds: int, limit: tuple[int, float]) -> Row:
    """Seconds of `learn`, the making of the fleet and the reading of files apart; `limit`: so many runs in so many seconds."""
    plan.say(title)
    spent: list[float] = []
    results: list[Result] = []
    held = 0

    def learn() -> float:
        learner = Learner(runs, device=plan.device, data_dir=plan.data_dir)
        return clocked(lambda: results.extend(learner.learn()), plan.device)

    for _ in range(rounds):
        try:
            seconds, held = (learn(), 0) if plan.device.type == "cpu" else peak(learn, plan.device)
        except torch.cuda.OutOfMemoryError:
            return row(title, says="out of memory", members=len(runs))
        spent.append(seconds)
    best, each = min(spent), min(spent) / len(runs)
    averages: dict[str, list[float]] = {}  # of the last round, by method, in percent
    for result in results[-len(runs) :]:
        if result.status == "done":
            averages.setdefault(result.run.method, []).append(100 * result.average)
    value = best if limit[0] == len(runs) else each
    return row(
        title,
        best,
        rate=f"{many(each)} s a run",
        says="average accuracy " + ", ".join(f"{_spread(of)} ({method})" for method, of in averages.items()),
        memory=held or None,
        target=None if plan.quick else aim(value, "≤", limit[1], " s" if limit[0] == len(runs) else " s a run"),
        members=len(runs),
        seconds_a_run=each,
        precision=runs[0].precision,
        averages=averages,
        failed=sum(r.status != "done" for r in results),
        rounds=spent,
    )


def _spread(percents: list[float]) -> str:
    mean, std = spread(percents)
    return f"{mean:.2f} ± {std:.2f}" if len(percents) > 1 else f"{mean:.2f}"
