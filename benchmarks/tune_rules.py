"""Which rule should choose λ_Ω after two or three tasks? Four rules beside the best λ_Ω after all tasks, on small streams.

    python benchmarks/tune_rules.py --out results/trials/tune/rules.json       # about ten minutes on two cores

Each case trains a preserver with SLNID at λ = 3e-4 and every λ_Ω of the default grid of `selfless tune`, on all tasks of a stream. A row of
the accuracy matrix after two or three tasks is what `tune` sees, held-out images only; the last row is how such a run ends.

    largest   the largest λ_Ω within half a point of the best so far ("strong, then decay")
    best      the best so far
    middle    the middle one of those within half a point of the best so far
    smallest  the smallest λ_Ω within half a point of the best so far

The gap of a rule is the held-out accuracy after the last task of the best λ_Ω less that of the λ_Ω it chose, mean of the seeds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import selfless
from selfless import Run
from selfless.bench.hardware import describe_hardware
from selfless.experiments.tuning import PRESERVE
from selfless.files import write_json

STREAMS: dict[str, dict[str, Any]] = {
    "permuted MNIST, 5 tasks": {"stream": "permuted-mnist", "tasks": 5, "model": "mlp-64"},
    "permuted MNIST, 10 tasks": {"stream": "permuted-mnist", "tasks": 10, "model": "mlp-64"},
    "rotated MNIST, 5 tasks": {"stream": "rotated-mnist", "tasks": 5, "model": "mlp-64"},
    "split MNIST, 5 tasks, one head": {"stream": "split-mnist", "tasks": 5, "model": "mlp-64", "scenario": "domain"},
    "split CIFAR-100, 10 tasks": {"stream": "split-cifar-100", "tasks": 10, "model": "mlp-64"},
}
METHODS = ("mas", "ewc", "lwf")
GRID = (0.0, *PRESERVE)
DROP, SEEN = 0.5, (2, 3)


def rules(seen: Sequence[float]) -> dict[str, int]:
    """Return the number of the λ_Ω that each rule chooses, from the accuracies so far in percent."""
    close = [i for i, score in enumerate(seen) if score >= max(seen) - DROP]
    return {"largest": close[-1], "best": int(np.argmax(seen)), "middle": close[(len(close) - 1) // 2], "smallest": close[0]}


def compare(name: str, method: str, options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Train a case and return the accuracies after two and after all tasks, and the gap of each rule."""
    training = {"epochs": options.epochs, "batch": 20, "lr": 0.02, "held_out": 0.2, "sparsify": "slnid:3e-4"}
    settings = STREAMS[name] | training | {"stream_options": {"limit": options.limit}}
    seeds = range(100, 100 + options.seeds)
    runs = [Run(**settings, preserve=f"{method}:{strength:g}", seed=seed) for strength in GRID for seed in seeds]
    results = selfless.train(runs, out=out, data_dir=options.data, checkpoints=False)
    matrices = [result.held_out for result in results if result.held_out is not None]

    def after(tasks: int) -> list[float]:
        """Return the mean accuracy on the first tasks after the newest of them, for each λ_Ω, in percent."""
        means = np.array([matrix[tasks - 1][:tasks].mean() for matrix in matrices])
        return [100 * float(part.mean()) for part in np.split(means, len(GRID))]

    last = after(STREAMS[name]["tasks"])
    chosen = {f"{rule}, {seen} tasks": i for seen in SEEN for rule, i in rules(after(seen)).items()}
    return {
        "case": name,
        "method": method,
        "after": {str(seen): dict(zip(map(str, GRID), after(seen), strict=True)) for seen in SEEN},
        "after_all": dict(zip(map(str, GRID), last, strict=True)),
        "chosen": {rule: GRID[i] for rule, i in chosen.items()},
        "gap": {rule: max(last) - last[i] for rule, i in chosen.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=STREAMS)
    parser.add_argument("--seeds", type=int, default=2, help="from 100 up")
    parser.add_argument("--limit", type=int, default=1000, help="images of a task")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("tune-rules.json"))
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only or STREAMS:
            for method in METHODS:
                rows.append(compare(name, method, options, Path(folder)))
                print(
                    f"{name}, {method}: "
                    + ", ".join(f"{rule} {rows[-1]['chosen'][rule]:g} gap {gap:.2f}" for rule, gap in rows[-1]["gap"].items()),
                    flush=True,
                )
    means = {rule: float(np.mean([row["gap"][rule] for row in rows])) for rule in rows[0]["gap"]}
    settings = {k: v for k, v in vars(options).items() if k in ("seeds", "limit", "epochs")}
    write_json(options.out, {"hardware": describe_hardware(torch.device("cpu")), "settings": settings, "rows": rows, "mean_gap": means})
    print("mean gap: " + ", ".join(f"{rule} {gap:.2f}" for rule, gap in means.items()))


if __name__ == "__main__":
    main()
