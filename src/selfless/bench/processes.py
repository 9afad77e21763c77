"""Time a fleet in this process, or split over worker processes of one thread each, as `selfless run` splits it on a CPU.

A worker is `python -m selfless.bench.processes`. It reads one JSON line with its runs, prints "ready" when the fleet is made, waits for a
line, trains, and prints its times as one JSON line. So all workers train at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from selfless.engine.learner import Learner
from selfless.spec import Run

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
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "selfless.bench.processes"]
    with contextlib.ExitStack() as stack:
        children = []
        for job in jobs:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            stack.callback(_stop, child)
            children.append(child)
            _send(child, json.dumps({"runs": [r.as_dict() for r in job], "data_dir": str(data_dir or "")}))
        for child in children:
            _receive(child)  # "ready"
        for child in children:
            _send(child, "go")
        found = [json.loads(_receive(child)) for child in children]
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


def _send(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()


def _receive(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError("a worker process of the benchmark stopped; see its error message above")
    return line


def _stop(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        child.terminate()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def main() -> None:
    """Be a worker process."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")  # the pipe to the parent; everything else that is printed goes to standard error
    os.dup2(2, 1)
    job = json.loads(sys.stdin.readline())

    def wait_for_go() -> None:
        print("ready", file=answers, flush=True)
        if not sys.stdin.readline():
            sys.exit(1)  # the parent has ended

    runs = [Run.from_dict(r) for r in job["runs"]]
    print(json.dumps(time_fleet(runs, Path(job["data_dir"]) if job["data_dir"] else None, wait_for_go)), file=answers, flush=True)


if __name__ == "__main__":
    main()
