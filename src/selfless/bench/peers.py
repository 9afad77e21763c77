"""The same work in other libraries, on the CPU: MAS on permuted MNIST beside Avalanche's, the Fisher information beside a loop.

The others run in an environment of their own, which only a checkout has: benchmarks/peers/README.md. A fleet of eight is measured both
as one process with all threads and as `selfless run` spreads it: worker processes of one thread each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from selfless import importance
from selfless.bench.eager import images, network
from selfless.bench.plan import Plan, Unavailable
from selfless.bench.rig import mlp
from selfless.bench.rows import Row, aim, many, row
from selfless.data import DataError, data_dirs, find_entry, load
from selfless.engine.learner import Learner
from selfless.preserve import MAS
from selfless.sparsify import SLNID, NoSparsifier, Sparsifier
from selfless.spec import Run

PEERS = Path(__file__).resolve().parents[3] / "benchmarks" / "peers"
BATCH, HIDDEN, LR, MOMENTUM, STRENGTH, FLEET = 200, 128, 0.01, 0.9, 0.1, 8
CLASSIC, MEMORY = "Avalanche MAS, its PermutedMNIST", "Avalanche MAS, fed from memory"
CPU = torch.device("cpu")  # where the peers are measured
Measured = dict[str, Any]


def run(plan: Plan) -> Iterator[Row]:
    python = environment()
    try:
        held = load("mnist", data_dir=plan.data_dir, download=False)
    except DataError as error:
        raise Unavailable(f"{error}; or: selfless data fetch mnist") from error
    folder = find_entry("mnist").find(data_dirs(plan.data_dir))[0]
    yield from _runs(plan, python, folder)
    yield from _fisher(plan, python)
    del held


def environment() -> Path:
    """The Python of the peers' environment."""
    if not (PEERS / "avalanche_mas.py").is_file():
        raise Unavailable(f"{PEERS} is not there: the peers come with a checkout of the repository, not with an installed package")
    python = PEERS / ".venv" / "bin" / "python"
    if not python.exists():
        raise Unavailable(f"{python} is not there; build it with: sh {PEERS / 'setup.sh'}")
    return python


# ----------------------------------------------------------------------------------------------------------- MAS, permuted MNIST
def _runs(plan: Plan, python: Path, folder: Path) -> list[Row]:
    tasks, threads = 1 if plan.quick else 2, torch.get_num_threads()
    workers = max(1, min(threads, FLEET))
    sides: dict[str, Callable[[], Measured]] = {
        CLASSIC: lambda: _avalanche(python, folder, "classic", tasks),
        MEMORY: lambda: _avalanche(python, folder, "memory", tasks),
    }
    mas, slnid = _members(NoSparsifier(), tasks), _members(SLNID(1e-3), tasks)
    low = [dataclasses.replace(run, precision="bf16") for run in mas]
    for name, runs in (("selfless MAS", mas), ("selfless MAS + SLNID", slnid), ("selfless MAS in bf16", low)):
        fleet = f"{name}, a run in a fleet of {FLEET}"
        sides |= {
            f"{name}, one run": lambda runs=runs: ours(runs[:1], plan.data_dir),  # type: ignore[misc]
            f"{fleet}, one process": lambda runs=runs: ours(runs, plan.data_dir),  # type: ignore[misc]
            f"{fleet}, {workers} worker{'s' * (workers > 1)}": lambda runs=runs: spread(runs, workers, plan.data_dir),  # type: ignore[misc]
        }
    rounds: dict[str, list[Measured]] = {name: [] for name in sides}
    for _ in range(1 if plan.quick else 3):
        for name, side in sides.items():
            plan.say(name)
            rounds[name].append(side())
    best = {name: min(found, key=lambda r: r["seconds_per_task_epoch"]) for name, found in rounds.items()}
    bases = {name: best[name]["seconds_per_task_epoch"] for name in (CLASSIC, MEMORY)}
    fleets = [[name for name in sides if name.startswith(f"{kind}, a run in")] for kind in ("selfless MAS", "selfless MAS in bf16")]
    quickest = [min(names, key=lambda name: best[name]["seconds_per_task_epoch"]) for names in fleets]
    rows = []
    for name, one in best.items():
        seconds = one["seconds_per_task_epoch"]
        ratios = {base: spent / seconds for base, spent in bases.items()}
        parts = f"training {one['training_seconds_per_epoch']:.2f} s, importance {one['importance_seconds_per_task']:.2f} s"
        rows.append(
            row(
                f"{name}, a task-epoch",
                seconds,
                rate=parts,
                says=f"{many(ratios[CLASSIC])}× its PermutedMNIST, {many(ratios[MEMORY])}× from memory",
                target=aim(ratios[CLASSIC], "≥", 20, "×") if name in quickest and not plan.quick else None,
                times_its_permuted_mnist=ratios[CLASSIC],
                times_from_memory=ratios[MEMORY],
                average_accuracy=one["average_accuracy"],
                tasks=tasks,
                threads=threads,
                batch=BATCH,
                hidden=HIDDEN,
                rounds=rounds[name],
            )
        )
    return rows


def _members(sparsify: Sparsifier, tasks: int) -> list[Run]:
    return [
        Run(
            model=f"mlp-{HIDDEN}",
            preserve=MAS(STRENGTH),
            sparsify=sparsify,
            tasks=tasks,
            epochs=1,
            batch=BATCH,
            lr=LR,
            momentum=MOMENTUM,
            seed=s,
        )
        for s in range(FLEET)
    ]


def ours(runs: list[Run], data_dir: Path | None, ready: Callable[[], None] = lambda: None) -> Measured:
    """The engine on the same work in this process: seconds a task-epoch and run, training and importance apart.

    `ready` is called when everything is set up and only the learning is left.
    """
    learner, training, measuring = Learner(runs, data_dir=data_dir), list[float](), list[float]()
    fleet = learner.fleet
    fleet.train_epoch = _timed(fleet.train_epoch, training)  # type: ignore[method-assign]
    fleet.consolidate = _timed(fleet.consolidate, measuring)  # type: ignore[method-assign]
    ready()
    results = learner.learn()
    return _measured(training, measuring, len(runs), results[0].accuracy[-1].tolist())


def _measured(training: list[float], measuring: list[float], runs: int, accuracy: list[float]) -> Measured:
    return {
        "seconds_per_task_epoch": (sum(training) + sum(measuring)) / len(training) / runs,
        "training_seconds_per_epoch": statistics.mean(training) / runs,
        "importance_seconds_per_task": statistics.mean(measuring) / runs,
        "training_seconds": training,
        "importance_seconds": measuring,
        "accuracy": accuracy,
        "average_accuracy": statistics.mean(accuracy),
    }


def spread(runs: list[Run], workers: int, data_dir: Path | None) -> Measured:
    """The same fleet in `workers` processes of one thread, all at once: the slowest decides."""
    share = -(-len(runs) // workers)
    jobs = [runs[i : i + share] for i in range(0, len(runs), share)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "selfless.bench.worker"]
    with contextlib.ExitStack() as closing:
        children = []
        for job in jobs:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            closing.callback(_stop, child)
            children.append(child)
            _tell(child, json.dumps({"runs": [r.as_dict() for r in job], "data_dir": str(data_dir or "")}))
        for child in children:
            _hear(child)  # ready
        for child in children:
            _tell(child, "go")
        found = [json.loads(_hear(child)) for child in children]
    slowest = max(found, key=lambda f: sum(f["training_seconds"]) + sum(f["importance_seconds"]))
    made = _measured(slowest["training_seconds"], slowest["importance_seconds"], len(runs), found[0]["accuracy"])
    return made | {"workers": found}


def _tell(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()


def _hear(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError("a worker of the benchmark stopped; its message is above")
    return line


def _stop(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        child.terminate()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def _timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        value = call(*args)
        seconds.append(time.perf_counter() - start)
        return value

    return timed


def _avalanche(python: Path, folder: Path, loading: str, tasks: int) -> Measured:
    settings = {
        "loading": loading,
        "data": folder,
        "tasks": tasks,
        "batch": BATCH,
        "hidden": HIDDEN,
        "lr": LR,
        "momentum": MOMENTUM,
        "lambda": STRENGTH,
        "threads": torch.get_num_threads(),
    }
    return _answer(python, "avalanche_mas.py", settings)


# ----------------------------------------------------------------------------------------------------------- Fisher information
def _fisher(plan: Plan, python: Path) -> list[Row]:
    """The Fisher information by a loop over samples in batches of one, as van de Ven's code takes it, beside our closed forms."""
    samples, kind = 100 if plan.quick else 2_000, mlp(HIDDEN)
    model, (x, y) = network(kind, CPU), images(kind, 10 * samples, CPU)
    pairs = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    rows = []
    for labels, fisher in (("true", "empirical"), ("all", "exact")):
        plan.say(f"Fisher information, {fisher}")
        theirs, mine = list[Measured](), list[float]()
        for _ in range(1 if plan.quick else 3):
            settings = {"samples": samples, "hidden": HIDDEN, "labels": labels, "threads": torch.get_num_threads()}
            theirs.append(_answer(python, "per_sample_fisher.py", settings))
            begun = time.perf_counter()
            importance.ewc(model, pairs, fisher=fisher)  # type: ignore[arg-type]
            mine.append(time.perf_counter() - begun)
        loop, closed = min(t["seconds_per_sample"] for t in theirs), min(mine) / len(x)
        title = f"Fisher ({fisher}), {kind.title}, a sample"
        rows.append(row(f"{title}, loop over samples", loop, rate=f"{many(1 / loop)} samples/s", samples=samples, rounds=theirs))
        says = f"{many(loop / closed)}× as fast as the loop over samples"
        rows.append(
            row(f"{title}, selfless", closed, rate=f"{many(1 / closed)} samples/s", says=says, times_loop=loop / closed, rounds=mine)
        )
    return rows


def _answer(python: Path, script: str, settings: dict[str, Any]) -> Measured:
    """One JSON object from a script of the peers' environment."""
    words = [str(w) for name, value in settings.items() for w in (f"--{name}", value)]
    command = [str(python), str(PEERS / script), *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    result: Measured = json.loads(done.stdout.strip().splitlines()[-1])
    return result
