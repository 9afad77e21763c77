"""What measuring the room of a network costs, as a share of a task's time: the same runs with and without it, in turns.

    python benchmarks/capacity_cost.py --out capacity-cost.json
    python benchmarks/capacity_cost.py --only cifar --device cuda --out capacity-cost.json

Every case is a fleet. It is trained `--repeats` times with the measurement and as often without, alternately. Two shares are written: the
time inside the measurement by the clock, and the difference of the medians. Training itself has the same bits either way; that is checked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from selfless import Run
from selfless.bench.hardware import describe_hardware
from selfless.engine import learner, room
from selfless.engine.learner import Learner

CASES: dict[str, dict[str, Any]] = {
    "mnist": {"stream": "permuted-mnist", "model": "mlp-128", "epochs": 10},
    "mnist-2000": {"stream": "permuted-mnist", "model": "mlp-2000", "epochs": 10},
    "cifar": {"stream": "split-cifar-100", "model": "cnn-256", "epochs": 50, "layers": "all"},
}


def train(case: dict[str, Any], options: argparse.Namespace, measured: bool) -> tuple[float, float, Any]:
    """Return the seconds of a whole run, those inside the measurement, and the accuracies."""
    epochs = options.epochs or case["epochs"]
    limit = {} if options.limit is None else {"stream_options": {"limit": options.limit}}
    run = case | {"epochs": epochs, "tasks": options.tasks, "preserve": "mas:0.1", "sparsify": "slnid:1e-3"} | limit
    runs = [Run(**run, seed=seed) for seed in range(options.members)]
    inside, plain = [0.0], room.measure_activity

    def add(fleet: Any, entries: Any) -> None:
        started = time.perf_counter()
        room.add_capacity(fleet, entries)
        if fleet.device.type == "cuda":
            torch.cuda.synchronize()
        inside[0] += time.perf_counter() - started if measured else 0.0

    room.measure_activity = plain if measured else lambda fleet: {}
    learner.add_capacity = add
    try:
        taught = Learner(runs, device=options.device, data_dir=options.data)
        started = time.perf_counter()
        results = taught.learn()
        return time.perf_counter() - started, inside[0], np.stack([r.accuracy for r in results])
    finally:
        room.measure_activity, learner.add_capacity = plain, room.add_capacity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="fewer than a real run has: the share is then larger")
    parser.add_argument("--limit", type=int, help="images of a task")
    parser.add_argument("--members", type=int, default=4, help="seeds that train together")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("capacity-cost.json"))
    options = parser.parse_args()
    torch.set_num_threads(1 if options.device == "cpu" else torch.get_num_threads())  # as `selfless.train` has it
    about = {"hardware": describe_hardware(torch.device(options.device)), "cases": {}}
    found = json.loads(options.out.read_text()) if options.out.exists() else about
    for name in options.only or CASES:
        if name in found["cases"]:
            continue
        seconds: dict[bool, list[float]] = {True: [], False: []}
        shares, accuracies = [], []
        for turn in range(2 * options.repeats):
            total, inside, accuracy = train(CASES[name], options, measured := turn % 2 == 0)
            seconds[measured].append(total)
            accuracies.append(accuracy)
            shares += [inside / total] if measured else []
        assert all(np.array_equal(a, accuracies[0]) for a in accuracies), "measuring changed the training"
        with_it, without = statistics.median(seconds[True]), statistics.median(seconds[False])
        found["cases"][name] = {
            "share_inside": statistics.median(shares),
            "share_by_difference": with_it / without - 1,
            "seconds": {"with": seconds[True], "without": seconds[False]},
            "settings": {k: str(v) for k, v in vars(options).items() if k not in ("out", "data", "only")},
        }
        print(name, found["cases"][name])
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
