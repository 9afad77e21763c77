"""Time a fleet in this process, or split over worker processes of one thread each, as `selfless run` splits it on a CPU.

A worker is `python -m selfless.bench.processes`, a process of `selfless.workers.Pool`. It says when its fleet is made and waits for a file
that the parent creates when all workers are ready. So all workers train at the same time.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from selfless.engine.learner import Learner
from selfless.spec import Run
from selfless.workers import Pool, Send, serve

FleetTimes = dict[str, Any]


def time_fleet(runs: list[Run], data_dir: Path | None, ready: Callable[[], None] = lambda: None) -> FleetTimes:
    """Train the runs in this process; return seconds per task-epoch and run, with training and importance apart.

    `ready` is called when everything is prepared and only the training is left.
    """
    learner, training, importance = Learner(runs, data_dir=data_dir), list[float](), list[float]()
    fleet = learner.fleet
    fleet.train_epoch = _with_clock(fleet.train_epoch, training)  # type: ignore[method-assign]
    fleet.consolidate = _with_clock(fleet.consolidate, importance)  # type: ignore[method-assign]
    ready()
    results = learner.learn()
    return _summarise(training, importance, len(runs), results[0].accuracy[-1].tolist())


def time_split_fleet(runs: list[Run], workers: int, data_dir: Path | None) -> FleetTimes:
    """Train the runs in `workers` processes at the same time; return the times of the slowest."""
    share = -(-len(runs) // workers)
    jobs = [runs[i : i + share] for i in range(0, len(runs), share)]
    ready, times_of = set[int](), dict[int, FleetTimes]()
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"

        def receive(job: int, message: dict[str, Any]) -> None:
            if "times" in message:
                times_of[job] = message["times"]
            else:
                ready.add(job)
                if len(ready) == len(jobs):
                    start.touch()

        described = [{"runs": [r.as_dict() for r in job], "data_dir": str(data_dir or ""), "start": str(start)} for job in jobs]
        Pool([sys.executable, "-m", "selfless.bench.processes"], len(jobs)).run(described, receive)
    found = [times_of[job] for job in range(len(jobs))]
    slowest = max(found, key=lambda f: sum(f["training_seconds"]) + sum(f["importance_seconds"]))
    times = _summarise(slowest["training_seconds"], slowest["importance_seconds"], len(runs), found[0]["accuracy"])
    return times | {"workers": found}


def _summarise(training: list[float], importance: list[float], runs: int, accuracy: list[float]) -> FleetTimes:
    return {
        "seconds_per_task_epoch": (sum(training) + sum(importance)) / len(training) / runs,
        "training_seconds_per_epoch": statistics.mean(training) / runs,
        "importance_seconds_per_task": statistics.mean(importance) / runs,
        "training_seconds": training,
        "importance_seconds": importance,
        "accuracy": accuracy,
        "average_accuracy": statistics.mean(accuracy),
    }


def _with_clock(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return the same function; the time of every call is appended to `seconds`."""

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        value = call(*args)
        seconds.append(time.perf_counter() - start)
        return value

    return timed


def _work(job: dict[str, Any], send: Send) -> None:
    """Do one job: prepare the fleet, wait for the start, train, and send the times."""

    def wait_for_start() -> None:
        send(ready=True)
        while not Path(job["start"]).exists():
            time.sleep(1e-3)

    runs = [Run.from_dict(r) for r in job["runs"]]
    send(times=time_fleet(runs, Path(job["data_dir"]) if job["data_dir"] else None, wait_for_start))


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(_work)
