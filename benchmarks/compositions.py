"""Sums of methods, and DeCov that spares old tasks, beside their parts, with equal budgets: CIFAR-100, augmented, cnn-256, all layers.

    python benchmarks/compositions.py --out compositions                       # all groups, on one H200 about seven minutes
    python benchmarks/compositions.py --group sparing --minutes 9 --out compositions
    python benchmarks/compositions.py --quick --device cpu --out compositions  # runs all of the code on a few images and proves nothing

Every method gets the same number of strengths (`--budget`) and the same seed to choose with (100), on a tenth of the training images that
is held out. The chosen strength is then trained on seeds 0 to 4 and evaluated on test images. Runs are recorded under OUT and never
trained twice. `--minutes` ends the study after the fleet that is under way, with the exit status 3 if something is left: call it again.
OUT/compositions.json holds the choice, the held-out scores of all strengths and the test accuracies.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import selfless
from selfless import Run
from selfless.metrics import spread
from selfless.runner import Store

COMMON: dict[str, Any] = {"stream": "split-cifar-100", "model": "cnn-256", "layers": "all", "epochs": 20, "lr": 0.03, "schedule": "cosine"}
COMMON |= {"augment": "crop-flip", "precision": "bf16"}
LWF, DECOV, SLNID = ("1", "3", "10"), ("3e-3", "6e-3", "1e-2"), ("1e-4", "3e-4", "1e-3")
SPARING = ("6e-3", "1e-2", "3e-2")  # locality leaves out distant pairs
CHOOSING = 100  # the seed
Pairs = list[tuple[str, str]]


def pairs(preserve: str, first: tuple[str, ...], sparsify: str, second: tuple[str, ...]) -> Pairs:
    """Return every combination of strengths, nearest to the middle of both grids first, so that a budget cuts the corners."""
    grid = itertools.product(range(len(first)), range(len(second)))
    middle = sorted(grid, key=lambda ij: abs(ij[0] - len(first) // 2) + abs(ij[1] - len(second) // 2))
    return [(preserve.format(first[i]), sparsify.format(second[j])) for i, j in middle]


GROUPS: dict[str, dict[str, Pairs]] = {
    "parts": {"LwF, DeCov": pairs("lwf:{}", LWF, "decov:{}", DECOV)},
    "sparing": {
        "LwF, DeCov discounted": pairs("lwf:{}", LWF, "decov-sparing:{},local=false", DECOV),
        "LwF, DeCov local": pairs("lwf:{}", LWF, "decov-sparing:{},discount=none", SPARING),
        "LwF, DeCov discounted and local": pairs("lwf:{}", LWF, "decov-sparing:{}", SPARING),
    },
    "sparsifiers": {"LwF, SLNID + DeCov": pairs("lwf:{}", LWF, "slnid:1e-4+decov:{}", DECOV)},
    "preservers": {
        "LwF + MAS, DeCov": pairs("lwf:3+mas:{}", ("0.003", "0.01", "0.1"), "decov:{}", DECOV),
        "LwF + PackNet, DeCov": pairs("lwf:3+packnet:{}", ("0.5", "0.75", "0.85"), "decov:{}", DECOV),
    },
    "others": {
        "LwF": pairs("lwf:{}", ("0.3", "1", "3", "10", "30"), "none{}", ("",)),
        "LwF, SLNID": pairs("lwf:{}", LWF, "slnid:{}", SLNID),
        "PackNet, DeCov": pairs("packnet:{}", ("0.65", "0.75", "0.85"), "decov:{}", DECOV),
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", choices=GROUPS, action="append")
    parser.add_argument("--budget", type=int, default=5, help="strengths or pairs of strengths for each method")
    parser.add_argument("--seeds", type=int, default=5, help="seeds that are reported, from 0 up")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no fleet after so many minutes")
    parser.add_argument("--epochs", type=int, help="default: 20")
    parser.add_argument("--quick", action="store_true", help="two tasks of a few images, one epoch, cnn-16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("compositions"))
    options = parser.parse_args()
    more: dict[str, Any] = {"epochs": options.epochs} if options.epochs else {}
    if options.quick:
        more = {"epochs": 1, "tasks": 2, "model": "cnn-16", "stream_options": {"limit": 20}, "batch": 40, "precision": "fp32"}
        options.budget, options.seeds = 1, 1
    started, left, rows = time.monotonic(), False, []

    def train(runs: list[Run]) -> list[Any] | None:
        """Return the results; None if time is over and some are not recorded yet."""
        recorded = all(Store(options.out).has(run.key) for run in runs)
        if not recorded and time.monotonic() - started > 60 * options.minutes:
            return None
        found: list[Any] = selfless.train(runs, out=options.out, device=options.device, data_dir=options.data, checkpoints=False)
        return found

    for group in options.group or GROUPS:
        for name, candidates in GROUPS[group].items():
            chosen_from = candidates[: options.budget]
            trials = train([Run(**COMMON | more, preserve=p, sparsify=s, seed=CHOOSING, held_out=0.1) for p, s in chosen_from])
            if trials is None:
                left = True
                continue
            scores = [100 * float(r.held_out[-1].mean()) if r.status == "done" else float("nan") for r in trials]
            if np.isnan(scores).all():
                rows.append({"group": group, "method": name, "failed": True, "candidates": chosen_from})
                continue
            preserve, sparsify = chosen_from[int(np.nanargmax(scores))]
            final = train([Run(**COMMON | more, preserve=preserve, sparsify=sparsify, seed=seed) for seed in range(options.seeds)])
            if final is None:
                left = True
                continue
            accuracy = [100 * r.average for r in final]
            forgetting = [100 * r.summary().get("forgetting", float("nan")) for r in final]
            mean, std = spread(accuracy)
            trained = {"budget": len(chosen_from), "held_out": dict(zip(map(" | ".join, chosen_from), scores, strict=True))}
            row = {
                "group": group,
                "method": name,
                "preserve": preserve,
                "sparsify": sparsify,
                "accuracy": accuracy,
                "forgetting": forgetting,
            }
            rows.append(row | trained)
            print(f"{name:<34} {mean:6.2f} ± {std:.2f}   {preserve}, {sparsify}", flush=True)
    path = options.out / "compositions.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in old if row["method"] not in {new["method"] for new in rows}]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"settings": COMMON | more, "rows": kept + rows}, indent=1))
    Store(options.out).pack(remove=True)
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
