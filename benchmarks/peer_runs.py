"""MAS on permuted MNIST, ours beside Avalanche's: seconds a task-epoch, importance included, the same work in both."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from selfless import MAS, SLNID, NoSparsifier, Run
from selfless.engine.learner import Learner
from selfless.sparsify import Sparsifier

HERE = Path(__file__).parent
PEER = HERE / "peers" / ".venv" / "bin" / "python"
SCRIPT = HERE / "peers" / "avalanche_mas.py"
TASKS, BATCH, HIDDEN, LR, MOMENTUM, STRENGTH = 2, 200, 128, 0.01, 0.9, 0.1


def run(console: Console, quick: bool = False) -> dict[str, Any] | None:
    data = Path(os.environ.get("SELFLESS_DATA", HERE.parents[1] / "shared" / "data"))
    if not (data / "mnist").is_dir():
        console.print(f"peers: skipped, {data / 'mnist'} is not there; set SELFLESS_DATA to the folder that holds mnist/")
        return None
    if not PEER.exists():
        console.print(f"peers: skipped, {PEER} is not there; build it with: sh benchmarks/peers/setup.sh")
        return None
    sides: dict[str, Callable[[], dict[str, Any]]] = {
        "Avalanche MAS, its PermutedMNIST": lambda: theirs(data, "classic"),
        "Avalanche MAS, fed from memory": lambda: theirs(data, "memory"),
        "selfless MAS": lambda: ours(data, NoSparsifier()),
        "selfless MAS + SLNID": lambda: ours(data, SLNID(1e-3)),
        "selfless MAS, a run in a fleet of 8": lambda: ours(data, NoSparsifier(), 8),
        "selfless MAS + SLNID, a run in a fleet of 8": lambda: ours(data, SLNID(1e-3), 8),
    }
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    ours(data, NoSparsifier(), tasks=1)  # warm
    for _ in range(1 if quick else 3):
        for name, side in sides.items():
            rounds[name].append(side())
    table = Table(
        title=f"permuted MNIST, {TASKS} tasks × 1 epoch, 784-{HIDDEN}-{HIDDEN}-10, batch {BATCH}, {torch.get_num_threads()} threads"
    )
    for column in ("", "s a task-epoch", "training", "importance", "average accuracy", "× its PermutedMNIST", "× from memory"):
        table.add_column(column, justify="right" if column else "left")
    rows = []
    bases = [min(r["seconds_per_task_epoch"] for r in rounds[name]) for name in list(sides)[:2]]
    for name, results in rounds.items():
        best = min(results, key=lambda r: r["seconds_per_task_epoch"])
        ratios = [base / best["seconds_per_task_epoch"] for base in bases]
        rows.append({"name": name, "times_its_permuted_mnist": ratios[0], "times_from_memory": ratios[1], "rounds": results})
        table.add_row(
            name,
            f"{best['seconds_per_task_epoch']:.2f}",
            f"{best['training_seconds_per_epoch']:.2f}",
            f"{best['importance_seconds_per_task']:.2f}",
            f"{best['average_accuracy']:.4f}",
            *(f"{ratio:.1f}" for ratio in ratios),
        )
    console.print(table)
    return {"tasks": TASKS, "epochs": 1, "batch": BATCH, "hidden": HIDDEN, "runs": rows}


def theirs(data: Path, loading: str) -> dict[str, Any]:
    settings = {
        "loading": loading,
        "data": data / "mnist",
        "tasks": TASKS,
        "batch": BATCH,
        "hidden": HIDDEN,
        "lr": LR,
        "momentum": MOMENTUM,
        "lambda": STRENGTH,
    }
    words = [str(w) for name, value in settings.items() for w in (f"--{name}", value)]
    command = [str(PEER), str(SCRIPT), *words, "--threads", str(torch.get_num_threads()), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def ours(data: Path, sparsify: Sparsifier, count: int = 1, tasks: int = TASKS) -> dict[str, Any]:
    """The engine on the same work: seconds a task-epoch and run, in a fleet of `count`, training and importance apart."""
    runs = [Run(model=f"mlp-{HIDDEN}", preserve=MAS(STRENGTH), sparsify=sparsify, tasks=tasks, epochs=1, seed=s) for s in range(count)]
    learner = Learner(runs, data_dir=data)
    training, importance = [], []
    fleet = learner.fleet
    fleet.train_epoch = _timed(fleet.train_epoch, training)  # type: ignore[method-assign]
    fleet.consolidate = _timed(fleet.consolidate, importance)  # type: ignore[method-assign]
    results = learner.learn()
    return {
        "seconds_per_task_epoch": (sum(training) + sum(importance)) / tasks / count,
        "training_seconds_per_epoch": statistics.mean(training) / count,
        "importance_seconds_per_task": statistics.mean(importance) / count,
        "accuracy": results[0].accuracy[-1].tolist(),
        "average_accuracy": results[0].average,
    }


def _timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        value = call(*args)
        seconds.append(time.perf_counter() - start)
        return value

    return timed
