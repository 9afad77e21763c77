"""Does a task cost more time or memory when many were learned before? One network learns fifty tasks, and each task is measured.

    python benchmarks/fifty_tasks.py --out fifty.json
    python benchmarks/fifty_tasks.py --preserve lwf --tasks 50 --out fifty.json

Tasks are random permutations of random inputs with labels of a fixed random network: only cost counts here. For each preserver and each
task it writes the seconds of training and of `consolidate`, the bytes that the keeper holds, and those of its state_dict. The slope over
tasks is given in percent of the mean per task, with Student's 95 % interval: no growth if it contains 0. Seconds are those of the
processor ("clock": "cpu"), which other programs disturb less than those of the wall, and the fewest of `--repeats` count.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import selfless
from selfless.metrics import student_quantile

PRESERVERS = ("mas:0.1", "ewc:10", "si:1", "lwf:1", "packnet:0.9")
CHOSEN = 2_000  # samples of a task


def measure(preserve: str, tasks: int, width: int) -> dict[str, list[float]]:
    """Learn the tasks once; return the seconds and bytes of each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    teacher = nn.Linear(64, 10)
    keeper = selfless.attach(model, preserve, "slnid:1e-4")
    found: dict[str, list[float]] = {name: [] for name in ("training", "consolidate", "keeper_bytes", "state_bytes")}
    for task in range(tasks):
        g = torch.Generator().manual_seed(task)
        x = torch.randn(CHOSEN, 64, generator=g)
        y = teacher(x).argmax(1)
        x = x[:, torch.randperm(64, generator=g)]
        batches = list(zip(x.split(100), y.split(100), strict=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        keeper.anchor_with(optimizer)
        started = time.process_time()
        for epoch in range(2):
            keeper.begin_epoch(epoch, 2, batches=len(batches))
            for one in batches:
                loss = F.cross_entropy(model(one[0]), one[1]) + keeper.penalty(one)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        found["training"].append(time.process_time() - started)
        started = time.process_time()
        keeper.consolidate(batches)
        found["consolidate"].append(time.process_time() - started)
        found["keeper_bytes"].append(float(keeper.footprint().bytes))
        found["state_bytes"].append(float(sum(t.numel() * t.element_size() for t in keeper.state_dict().values())))
    return found


def growth(values: list[float]) -> dict[str, float]:
    """The slope over tasks in percent of the mean, with its 95 % interval; the first task has no preserver yet and is left out."""
    y = np.array(values[1:])
    t = np.arange(len(y)) - (len(y) - 1) / 2
    slope = float(y @ t / (t @ t))
    residual = y - y.mean() - slope * t
    width = student_quantile(0.975, len(y) - 2) * math.sqrt(float(residual @ residual) / (len(y) - 2) / float(t @ t))
    return {"mean": float(y.mean()), "percent_per_task": 100 * slope / float(y.mean()), "interval": 100 * width / float(y.mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preserve", action="append", help=f"default: {', '.join(PRESERVERS)}")
    parser.add_argument("--tasks", type=int, default=50)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("fifty.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for preserve in options.preserve or PRESERVERS:
        if preserve in found:
            continue
        rounds = [measure(preserve, options.tasks, options.width) for _ in range(options.repeats)]
        best = {name: np.min([one[name] for one in rounds], 0).tolist() for name in rounds[0]}
        found[preserve] = {
            "tasks": options.tasks,
            "clock": "cpu",
            "growth": {name: growth(values) for name, values in best.items()},
            "values": best,
        }
        options.out.write_text(json.dumps(found, indent=1))
        print(preserve, {name: f"{g['percent_per_task']:+.2f} ± {g['interval']:.2f} %" for name, g in found[preserve]["growth"].items()})


if __name__ == "__main__":
    main()
