"""Whole permuted-MNIST sequences as one fleet, and where their time goes.

    python benchmarks/sequences.py --out sequences-60.json                 # 60 runs of 5 tasks × 10 epochs; an H200: half a minute
    python benchmarks/sequences.py --device cpu --members 2 --epochs 1 --limit 500

Half of the runs have MAS alone, half MAS and SLNID. They are trained `--rounds` times after a first one that compiles; `seconds` is the
fastest. Then they are trained once more with the GPU waited for at the end of each phase: `phases`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from selfless.bench.sequence import permuted_runs
from selfless.engine import learner as learning
from selfless.engine.fleet import Fleet
from selfless.engine.learner import Learner

PHASES = [
    (Fleet, "train_epoch"),
    (Fleet, "begin_task"),
    (Fleet, "consolidate"),
    (Fleet, "evaluate"),
    (Learner, "load"),
    (learning, "add_capacity"),
]


def train(options: argparse.Namespace) -> tuple[float, list[Any]]:
    """Return the seconds of training all runs, and their results. Reading files and making the fleet are not counted."""
    runs = permuted_runs(options.members // 2, options.tasks, options.epochs, options.limit)
    learner = Learner(runs, device=options.device, data_dir=options.data)
    _wait(options.device)
    started = time.perf_counter()
    results = learner.learn()
    _wait(options.device)
    return time.perf_counter() - started, results


def train_by_phase(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Train once more; return the seconds and the calls of each phase."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"seconds": 0.0, "calls": 0})
    plain = [(owner, name, getattr(owner, name)) for owner, name in PHASES]

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            _wait(options.device)
            started = time.perf_counter()
            result = function(*args, **kwargs)
            _wait(options.device)
            found[name]["seconds"] += time.perf_counter() - started
            found[name]["calls"] += 1
            return result

        return call

    for owner, name, function in plain:
        setattr(owner, name, timed(name, function))
    try:
        found["all"] = {"seconds": train(options)[0], "calls": 1}
    finally:
        for owner, name, function in plain:
            setattr(owner, name, function)
    return dict(found)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--members", type=int, default=60, help="runs, an even number")
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--limit", type=int, help="images of a task")
    parser.add_argument("--rounds", type=int, default=2, help="trainings that are timed")
    parser.add_argument("--data", type=Path, help="folder with MNIST")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.members < 2 or options.members % 2 or options.rounds < 1:
        parser.error("--members is an even number, half of it for each method, and --rounds at least 1")
    first, _ = train(options)
    rounds, results = [], []
    for _ in range(options.rounds):
        spent, results = train(options)
        rounds.append(spent)
    averages: dict[str, list[float]] = defaultdict(list)
    for result in results:
        averages[result.run.method].append(100 * result.average)
    means = {method: statistics.fmean(values) for method, values in averages.items()}
    found = {
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
        "torch": torch.__version__,
        "settings": {name: str(value) for name, value in vars(options).items() if name not in ("out", "data")},
        "first_with_compiling": first,
        "seconds": min(rounds),
        "rounds": rounds,
        "averages": means,
        "phases": train_by_phase(options),
    }
    print(
        f"{options.members} sequences in {min(rounds):.2f} s (rounds {[round(r, 2) for r in rounds]}, first {first:.2f}), averages {means}"
    )
    for name, phase in found["phases"].items():
        print(f"    {name:14} {phase['seconds']:.3f} s in {phase['calls']:.0f} calls")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
