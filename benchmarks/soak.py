"""Does a long training grow? Memory, open files and threads of three long trainings, sampled until their end.

    python benchmarks/soak.py --to soak.json
    python benchmarks/soak.py --part keeper --steps 20000 --to soak.json

    tasks    one run that learns 100 permuted tasks; a sample after each task
    study    500 runs in 50 fleets on two worker processes; a sample of this process and of the workers twice a second
    keeper   20,000 steps in a loop of one's own, with a task every 2,000 steps; a sample every 200 steps

Each part has a process of its own. The first quarter of the samples is warm-up. Growth is the median of the last quarter beside that of the
second: memory may grow by `--percent` (5), open files and threads may not. Data is random: only growth counts here. Linux alone: /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import selfless
from selfless import MAS, SLNID, Run
from selfless.data import from_arrays
from selfless.files import write_json

Sample = dict[str, float]
WIDTHS = (8, 16, 24, 40, 56)


def sample(pid: int | str = "self") -> Sample:
    """Return the memory in megabytes, the open files and the threads of a process."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return {"megabytes": int(status["VmRSS"].split()[0]) / 1024, "files": files, "threads": int(status["Threads"])}


def sample_children() -> Sample | None:
    """Return the means over the child processes; None without one."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            for pid in (task / "children").read_text().split():
                with contextlib.suppress(OSError, KeyError):
                    found.append(sample(pid))
    return {name: statistics.fmean(one[name] for one in found) for name in found[0]} if found else None


def grown(samples: list[Sample], percent: float) -> dict[str, Any]:
    """Return the medians of the second and the last quarter, and what has grown between them."""
    quarter = len(samples) // 4
    medians = {
        name: [round(statistics.median(one[name] for one in part), 1) for part in (samples[quarter : 2 * quarter], samples[-quarter:])]
        for name in samples[0]
    }
    allowed = {"megabytes": 1 + percent / 100}
    return {"samples": len(samples), **medians, "grown": [n for n, (old, new) in medians.items() if new > old * allowed.get(n, 1.0)]}


def write_arrays(place: Path, tasks: int, samples: int = 400) -> str:
    """Write random images of `tasks` tasks of two classes; return the name of their stream."""
    rng = np.random.Generator(np.random.PCG64(0))
    y = np.arange(samples) % (2 * tasks)
    x = rng.integers(0, 256, (samples, 1, 8, 8)).astype(np.uint8)
    path = place / "tasks.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x[:100], y_test=y[:100], task=y // 2, task_test=y[:100] // 2)
    return f"arrays:{path}"


# ------------------------------------------------------------------------------------------------------------------- the parts
def soak_tasks(given: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.Generator(np.random.PCG64(0))
    x, y = rng.integers(0, 256, (600, 1, 10, 10)).astype(np.uint8), rng.integers(0, 10, 600)
    stream = from_arrays(x, y, x[:100], y[:100], kind="permuted", tasks=given.tasks)
    run = Run(model="mlp-64", preserve=MAS(0.1), sparsify=SLNID(1e-3), epochs=2, batch=50)
    samples: list[Sample] = []

    def watch(_: Any, event: Any) -> None:
        if event.evaluated:
            samples.append(sample())

    result = selfless.train(run, stream=stream, device="cpu", workers=1, watch=watch)
    assert result.accuracy.shape == (given.tasks, given.tasks)
    return {"tasks": given.tasks, "this process": grown(samples, given.percent)}


def soak_study(given: argparse.Namespace) -> dict[str, Any]:
    """Widths and weight decays cannot share a fleet, so each pair of them is one, of ten seeds.

    There are only five widths: memory grows a little with each new shape, which is not growth with runs.
    """
    with tempfile.TemporaryDirectory(prefix="selfless-soak-") as place:
        stream = write_arrays(Path(place), 3)
        shared = {"stream": stream, "preserve": MAS(0.1), "sparsify": SLNID(1e-3), "batch": 50}
        runs = [
            Run(weight_decay=1e-5 * (fleet // 5), model=f"mlp-{WIDTHS[fleet % 5]}", seed=seed, epochs=given.epochs, **shared)
            for fleet in range(given.runs // 10)
            for seed in range(10)
        ]
        own: list[Sample] = []
        workers: list[Sample] = []
        with _sampling(own, workers):
            began = time.monotonic()
            results = selfless.train(runs, out=Path(place, "out"), device="cpu", workers=2)
        assert all(result.status == "done" for result in results)
        seconds = round(time.monotonic() - began)
        return {"runs": len(runs), "seconds": seconds, "this process": grown(own, given.percent), "workers": grown(workers, given.percent)}


@contextlib.contextmanager
def _sampling(own: list[Sample], workers: list[Sample]) -> Iterator[None]:
    """Sample this process and its children twice a second. The thread that does it is one of those it counts."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.5):
            own.append(sample())
            if (found := sample_children()) is not None:
                workers.append(found)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def soak_keeper(given: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3))
    samples: list[Sample] = []
    each = max(given.steps // 10, 1)
    batches = [(torch.randn(32, 32), torch.randint(0, 10, (32,))) for _ in range(20)]
    for step in range(given.steps):
        if step % each == 0:
            if step:
                keeper.consolidate(batches)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            keeper.anchor_with(optimizer)
        x, y = batches[step % len(batches)]
        loss = F.cross_entropy(model(x), y) + keeper.penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 200 == 0:
            keeper.log()
            samples.append(sample())
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    return {"steps": given.steps, "this process": grown(samples, given.percent)}


PARTS = {"tasks": soak_tasks, "study": soak_study, "keeper": soak_keeper}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), action="append", help="default: all, each in a process of its own")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=20, help="of a run of the study")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--percent", type=float, default=5.0, help="what memory may grow")
    parser.add_argument("--to", type=Path, help="write the outcomes there as JSON; those of other parts in it stay")
    given = parser.parse_args()
    if len(parts := given.part or list(PARTS)) > 1:
        others = [word for word in sys.argv[1:] if word not in ("--part", *PARTS)]
        return max(subprocess.run([sys.executable, __file__, *others, "--part", part]).returncode for part in parts)
    torch.set_num_threads(1)
    found = {parts[0]: PARTS[parts[0]](given) | {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}}
    print(json.dumps(found, indent=1))
    if given.to:
        before = json.loads(given.to.read_text(encoding="utf-8")) if given.to.is_file() else {}
        write_json(given.to, before | found)
    return 1 if any(one["grown"] for one in found[parts[0]].values() if isinstance(one, dict)) else 0


if __name__ == "__main__":
    sys.exit(main())
