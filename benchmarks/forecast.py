"""How forecasts of `selfless.capacity.forecast` turn out: what they said after five tasks, and what then happened up to task 20.

    python benchmarks/forecast.py --out forecast                        # all cases, on one H200 about five minutes
    python benchmarks/forecast.py --quick --device cpu --out forecast   # runs all of the code on a few images and proves nothing
    python benchmarks/forecast.py --only mnist-64 --epochs 3 --seeds 2 --out forecast

Runs are recorded under OUT, so a stopped study goes on where it was. OUT/forecast.json holds, for each case, method, number of tasks known
and margin: the forecast with its interval, and how many of the following tasks did fit (null: all of them). A forecast is right if its
interval contains that number; where all tasks fitted, if its upper end is not below them. "Known" tasks are those of all seeds together, as
`selfless capacity` takes them; "by seed" each seed alone. Cases where the margin was lost before the forecast are left out of the count.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import selfless
from selfless import Run
from selfless.capacity import forecast
from selfless.capacity.trend import fitted

MNIST = {"stream": "permuted-mnist", "held_out": 0.1, "epochs": 10}
CIFAR = {"stream": "split-cifar-100", "held_out": 0.1, "epochs": 20, "lr": 0.03, "schedule": "cosine", "layers": "all", "precision": "bf16"}
CIFAR |= {"augment": "crop-flip", "stream_options": {"classes_per_task": 5}}  # so that there are twenty tasks
CASES: dict[str, dict[str, Any]] = {
    "mnist-64": MNIST | {"model": "mlp-64"},
    "mnist-128": MNIST | {"model": "mlp-128"},
    "cifar": CIFAR | {"model": "cnn-256"},
}
ON_MNIST = (("mas:0.01", "slnid:1e-3"), *((p, s) for p in ("mas:0.1", "mas:1", "mas:10") for s in ("none", "slnid:1e-3")))
METHODS = {
    "mnist-64": ON_MNIST,
    "mnist-128": ON_MNIST,
    "cifar": (("mas:1", "none"), ("mas:1", "slnid:1e-3"), ("lwf:1", "decov:3e-3")),
}
QUICK = {"mnist-64": {"limit": 40}, "mnist-128": {"limit": 40}, "cifar": {"limit": 4, "classes_per_task": 5}}  # images of a task or class
MARGINS = (0.02, 0.05, 0.1, 0.2)


def judge(accuracy: Any, known: int, margin: float) -> dict[str, Any]:
    """Compare the forecast from the first `known` tasks of accuracy (S, T) with what happened on average over its seeds."""
    said = forecast(accuracy[:, :known], margin)
    mean = accuracy.mean(0)
    happened = fitted(mean, margin, known)
    all_of_them = accuracy.shape[1] - known
    right = said.high >= all_of_them if happened is None else said.low <= happened <= said.high
    lost = fitted(mean[:known], margin, 0) is not None
    return {
        "known": known,
        "tasks": accuracy.shape[1],
        "said": said.as_dict(),
        "happened": happened,
        "right": bool(right),
        "lost_before": lost,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the forecasts as Markdown, as in docs/lab-notes/capacity.md."""
    lines = [
        "| method | margin | tasks known | said: more tasks fit | happened | within the interval |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        said = [row["said"][name] for name in ("more", "low", "high")]
        more, low, high = ("no limit" if value is None else f"{value:.0f}" for value in said)
        happened = f"all {row['tasks'] - row['known']}" if row["happened"] is None else row["happened"]
        method = " + ".join(f"`{part}`" for part in row["method"].split(" + ") if part != "none")
        place = f"{100 * row['margin']:.0f} | {row['known']} | {more} ({low} to {high}) | {happened}"
        lines.append(f"| {method} | {place} | {'yes' if row['right'] else 'no'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--known", type=int, nargs="+", default=[5, 8])
    parser.add_argument("--quick", action="store_true", help="six tasks of a few images, one epoch, two seeds")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, help="processes on a CPU")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("forecast"))
    options = parser.parse_args()
    if options.quick:
        options.tasks, options.seeds, options.epochs, options.known = 6, 2, 1, [4]
    rows: list[dict[str, Any]] = []
    learned: dict[str, Any] = {}  # accuracy on each task just after learning it, by case and method, then by seed
    for name in options.only or CASES:
        case = CASES[name] | ({"epochs": options.epochs} if options.epochs else {})
        common = case | {"tasks": options.tasks} | ({"stream_options": QUICK[name], "batch": 40} if options.quick else {})
        made = {m: [Run(**common, preserve=m[0], sparsify=m[1], seed=seed) for seed in range(options.seeds)] for m in METHODS[name]}
        every = [run for runs in made.values() for run in runs]
        how = {"device": options.device, "workers": options.workers, "data_dir": options.data}
        results = selfless.train(every, out=options.out, checkpoints=False, **how)
        by_run = {result.run: result for result in results}
        for method, runs in made.items():
            done = [by_run[run] for run in runs if by_run[run].status == "done"]
            accuracy = np.array([result.accuracy.diagonal() for result in done])
            learned.setdefault(name, {})[" + ".join(method)] = accuracy.tolist()
            for known in options.known:
                for margin in MARGINS if len(done) else ():
                    row = {"case": name, "method": " + ".join(method), "margin": margin, "seeds": len(done)}
                    rows.append(row | judge(accuracy, known, margin) | {"by_seed": [judge(one[None], known, margin) for one in accuracy]})
    open_rows = [row for row in rows if not row["lost_before"]]
    single = [one for row in rows for one in row["by_seed"] if not one["lost_before"]]
    summary = {
        "right": sum(row["right"] for row in open_rows),
        "of": len(open_rows),
        "right_by_seed": sum(one["right"] for one in single),
        "of_by_seed": len(single),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "forecast.json").write_text(json.dumps({"summary": summary, "accuracy": learned, "forecasts": rows}))
    print(table(open_rows))
    print(summary)


if __name__ == "__main__":
    main()
