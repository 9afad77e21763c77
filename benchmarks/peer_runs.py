"""MAS on permuted MNIST, ours beside Avalanche's: seconds a task-epoch, importance included, the same work in both."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import selfless
from selfless import MAS, SLNID, models

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
    rounds: dict[str, list[dict[str, Any]]] = {"avalanche MAS": [], "selfless MAS": [], "selfless MAS + SLNID": []}
    ours(data, None, tasks=1)  # warm
    for _ in range(1 if quick else 3):
        rounds["avalanche MAS"].append(theirs(data))
        rounds["selfless MAS"].append(ours(data, None))
        rounds["selfless MAS + SLNID"].append(ours(data, SLNID(1e-3)))
    table = Table(
        title=f"permuted MNIST, {TASKS} tasks × 1 epoch, 784-{HIDDEN}-{HIDDEN}-10, batch {BATCH}, {torch.get_num_threads()} threads"
    )
    for column in ("", "s a task-epoch", "training", "importance", "average accuracy", "× faster than Avalanche"):
        table.add_column(column, justify="right" if column else "left")
    rows = []
    base = min(r["seconds_per_task_epoch"] for r in rounds["avalanche MAS"])
    for name, results in rounds.items():
        best = min(results, key=lambda r: r["seconds_per_task_epoch"])
        rows.append({"name": name, "speedup": base / best["seconds_per_task_epoch"], "rounds": results})
        table.add_row(
            name,
            f"{best['seconds_per_task_epoch']:.2f}",
            f"{best['training_seconds_per_epoch']:.2f}",
            f"{best['importance_seconds_per_task']:.2f}",
            f"{best['average_accuracy']:.4f}",
            f"{base / best['seconds_per_task_epoch']:.1f}",
        )
    console.print(table)
    return {"tasks": TASKS, "epochs": 1, "batch": BATCH, "hidden": HIDDEN, "runs": rows}


def theirs(data: Path) -> dict[str, Any]:
    settings = {
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


# ------------------------------------------------------------------------------------------------------------------------------
# Our side. Today: the keeper in a plain loop. To be replaced by the engine; keep the result's keys, which are the peer's too.
def ours(data: Path, sparsify: SLNID | None, tasks: int = TASKS) -> dict[str, Any]:
    """Seconds a task-epoch of the same work as `avalanche_mas.py`: one epoch a task, then its importance."""
    source = selfless.data.load("mnist", data_dir=data, download=False)
    (x, y), (test_x, test_y) = ((images.flatten(1).float() / 255, labels) for images, labels in (source.train, source.test))
    generator = torch.Generator().manual_seed(0)
    model = models.build(f"mlp-{HIDDEN}", outputs=10, input_shape=source.shape, seed=0)
    keeper = selfless.attach(model, MAS(STRENGTH), sparsify, layers=["act1", "act2"] if sparsify else "auto")
    training, importance, tests = [], [], []
    for task in range(tasks):
        pixels = torch.randperm(784, generator=generator) if task else torch.arange(784)
        images = x[:, pixels]
        tests.append(test_x[:, pixels])
        start = time.perf_counter()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        keeper.anchor_with(optimizer)
        model.train()
        for rows in torch.randperm(len(images), generator=generator).split(BATCH):
            loss = F.cross_entropy(model(images[rows]), y[rows]) + keeper.penalty()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        trained = time.perf_counter()
        keeper.consolidate(zip(images.split(BATCH), y.split(BATCH), strict=True))
        training.append(trained - start)
        importance.append(time.perf_counter() - trained)
    with torch.no_grad():
        model.eval()
        accuracy = [float((model(images).argmax(1) == test_y).double().mean()) for images in tests]
    return {
        "seconds_per_task_epoch": statistics.mean(map(sum, zip(training, importance, strict=True))),
        "training_seconds_per_epoch": statistics.mean(training),
        "importance_seconds_per_task": statistics.mean(importance),
        "accuracy": accuracy,
        "average_accuracy": statistics.mean(accuracy),
    }


# ------------------------------------------------------------------------------------------------------------------------------
