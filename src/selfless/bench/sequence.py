"""Whole sequences of tasks on a GPU, importance and evaluation included: 60 permuted-MNIST runs at once, CIFAR-100 alone and in a fleet."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from selfless.bench.plan import Plan, Unavailable
from selfless.bench.table import Row, format_number, make_row, make_target
from selfless.bench.timing import measure_memory, time_call
from selfless.data import DataError, load
from selfless.engine.learner import Learner
from selfless.metrics import spread
from selfless.preserve import MAS
from selfless.sparsify import SLNID, NoSparsifier
from selfless.spec import Precision, Result, Run

CIFAR_FLEETS = (1, 8)
PRECISIONS: tuple[Precision, ...] = ("tf32", "bf16")
SIXTY = 2.5  # seconds to reach for the permuted-MNIST runs
LIMITS = {(1, "tf32"): 8.0, (1, "bf16"): 5.0, (8, "tf32"): 4.0, (8, "bf16"): 2.0}  # seconds of a run to reach


def run(plan: Plan) -> Iterator[Row]:
    """Yield a row for permuted MNIST, and one for each fleet size and precision on CIFAR-100."""
    if plan.device.type != "cuda":
        raise Unavailable("whole sequences take minutes to hours on a CPU and are measured on a GPU only: --device cuda")
    try:  # keep the images in memory for all rounds
        sources = [load(name, data_dir=plan.data_dir, download=False) for name in ("mnist", "cifar-100")]
    except DataError as error:
        raise Unavailable(f"{error}; or: selfless data fetch mnist cifar-100") from error
    yield permuted(plan)
    for members in CIFAR_FLEETS:
        for precision in PRECISIONS:
            yield cifar(plan, members, precision)
    del sources


def permuted_runs(seeds: int, tasks: int = 5, epochs: int = 10, limit: int | None = None) -> list[Run]:
    """Return permuted-MNIST runs of MAS, half of them with SLNID; `limit`: images of a task."""
    base = Run(preserve=MAS(0.01), tasks=tasks, epochs=epochs, stream_options={} if limit is None else {"limit": limit})
    return [dataclasses.replace(base, sparsify=kind, seed=seed) for kind in (NoSparsifier(), SLNID(1e-3)) for seed in range(seeds)]


def permuted(plan: Plan) -> Row:
    """Train 60 permuted-MNIST runs as one fleet: half without a sparsifier, half with SLNID."""
    runs = permuted_runs(1, tasks=2, epochs=1) if plan.quick else permuted_runs(30)
    title = f"{len(runs)} permuted-MNIST runs, {runs[0].tasks} tasks × {runs[0].epochs} epochs, {runs[0].model}"
    return _train_row(plan, title, runs, 1 if plan.quick else 3, limit=SIXTY, per_run=False)


def cifar(plan: Plan, members: int, precision: Precision) -> Row:
    """Train CIFAR-100 runs that differ in their seeds."""
    base = Run("split-cifar-100", "cnn-256", MAS(1.0), SLNID(3e-3), lr=0.03, schedule="cosine", precision=precision)
    base = dataclasses.replace(base, tasks=2 if plan.quick else 10, epochs=1 if plan.quick else 50)
    runs = [dataclasses.replace(base, seed=s) for s in range(members)]
    title = f"CIFAR-100 sequence, {base.tasks} tasks × {base.epochs} epochs, {base.model}, {precision}, fleet of {members}"
    rounds = 2 if members == 1 and not plan.quick else 1
    return _train_row(plan, title, runs, rounds, limit=LIMITS[members, precision], per_run=members > 1)


def _train_row(plan: Plan, title: str, runs: Sequence[Run], rounds: int, limit: float, per_run: bool) -> Row:
    """Time `Learner.learn`, without making the fleet and reading files. limit: the target in seconds, of all runs or per run."""
    plan.say(title)
    seconds: list[float] = []
    results: list[Result] = []
    peak_bytes = 0

    def learn() -> float:
        learner = Learner(runs, device=plan.device, data_dir=plan.data_dir)
        return time_call(lambda: results.extend(learner.learn()), plan.device)

    for _ in range(rounds):
        try:
            spent, peak_bytes = (learn(), 0) if plan.device.type == "cpu" else measure_memory(learn, plan.device)
        except torch.cuda.OutOfMemoryError:
            return make_row(title, says="out of memory", members=len(runs))
        seconds.append(spent)
    best, each = min(seconds), min(seconds) / len(runs)
    averages: dict[str, list[float]] = {}  # by method, in percent, of the last round
    for result in results[-len(runs) :]:
        if result.status == "done":
            averages.setdefault(result.run.method, []).append(100 * result.average)
    target = make_target(each, "≤", limit, " s a run") if per_run else make_target(best, "≤", limit, " s")
    return make_row(
        title,
        best,
        rate=f"{format_number(each)} s a run",
        says="average accuracy " + ", ".join(f"{_mean_and_std(values)} ({method})" for method, values in averages.items()),
        memory=peak_bytes or None,
        target=None if plan.quick else target,
        members=len(runs),
        seconds_a_run=each,
        precision=runs[0].precision,
        averages=averages,
        failed=sum(r.status != "done" for r in results),
        rounds=seconds,
    )


def _mean_and_std(percents: list[float]) -> str:
    mean, std = spread(percents)
    return f"{mean:.2f} ± {std:.2f}" if len(percents) > 1 else f"{mean:.2f}"
