"""The same work in other libraries, on the CPU: MAS on permuted MNIST in Avalanche, the Fisher information in a loop over samples.

The other libraries have their own Python environment, which exists only in a checkout (benchmarks/peers/README.md). Our fleet of eight is
measured in one process with all threads, and split over worker processes as `selfless run` does it.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from selfless import importance
from selfless.bench.eager import build_network, random_samples
from selfless.bench.engine import mlp
from selfless.bench.plan import Plan, Unavailable
from selfless.bench.processes import FleetTimes, time_fleet, time_split_fleet
from selfless.bench.table import Row, format_number, make_row, make_target
from selfless.data import DataError, data_dirs, find_entry, load
from selfless.preserve import MAS
from selfless.sparsify import SLNID, NoSparsifier, Sparsifier
from selfless.spec import Run

PEERS = Path(__file__).resolve().parents[3] / "benchmarks" / "peers"
BATCH, HIDDEN, LR, MOMENTUM, STRENGTH, FLEET = 200, 128, 0.01, 0.9, 0.1, 8
CLASSIC, MEMORY = "Avalanche MAS, its PermutedMNIST", "Avalanche MAS, fed from memory"
CPU = torch.device("cpu")  # the peers are measured there


def run(plan: Plan) -> Iterator[Row]:
    """Yield the rows of MAS on permuted MNIST, then those of the Fisher information."""
    python = find_environment()
    try:
        mnist = load("mnist", data_dir=plan.data_dir, download=False)  # kept in memory for all rounds
    except DataError as error:
        raise Unavailable(f"{error}; or: selfless data fetch mnist") from error
    folder = find_entry("mnist").find(data_dirs(plan.data_dir))[0]
    yield from _mas_rows(plan, python, folder)
    yield from _fisher_rows(plan, python)
    del mnist


def find_environment() -> Path:
    """Return the Python of the peers' environment."""
    if not (PEERS / "avalanche_mas.py").is_file():
        raise Unavailable(f"{PEERS} does not exist: the peers come with a checkout of the repository, not with an installed package")
    python = PEERS / ".venv" / "bin" / "python"
    if not python.exists():
        raise Unavailable(f"{python} does not exist; build it with: sh {PEERS / 'setup.sh'}")
    return python


# ----------------------------------------------------------------------------------------------------------- MAS, permuted MNIST
def _mas_rows(plan: Plan, python: Path, folder: Path) -> list[Row]:
    tasks, threads = 1 if plan.quick else 2, torch.get_num_threads()
    sides = _mas_sides(plan, python, folder, tasks)
    rounds: dict[str, list[FleetTimes]] = {name: [] for name in sides}
    for _ in range(1 if plan.quick else 3):
        for name, measure in sides.items():
            plan.say(name)
            rounds[name].append(measure())
    best = {name: min(found, key=lambda r: r["seconds_per_task_epoch"]) for name, found in rounds.items()}
    bases = {name: best[name]["seconds_per_task_epoch"] for name in (CLASSIC, MEMORY)}
    fleets = [[name for name in sides if name.startswith(f"{kind}, a run in")] for kind in ("selfless MAS", "selfless MAS in bf16")]
    fastest = [min(names, key=lambda name: best[name]["seconds_per_task_epoch"]) for names in fleets]
    rows = []
    for name, one in best.items():
        seconds = one["seconds_per_task_epoch"]
        ratios = {base: base_seconds / seconds for base, base_seconds in bases.items()}
        parts = f"training {one['training_seconds_per_epoch']:.2f} s, importance {one['importance_seconds_per_task']:.2f} s"
        rows.append(
            make_row(
                f"{name}, a task-epoch",
                seconds,
                rate=parts,
                says=f"{format_number(ratios[CLASSIC])}× its PermutedMNIST, {format_number(ratios[MEMORY])}× from memory",
                target=make_target(ratios[CLASSIC], "≥", 20, "×") if name in fastest and not plan.quick else None,
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


def _mas_sides(plan: Plan, python: Path, folder: Path, tasks: int) -> dict[str, Callable[[], FleetTimes]]:
    """Return everything that is compared, by name: Avalanche twice, and each of our methods alone, in a fleet, and in a split fleet."""
    workers = max(1, min(torch.get_num_threads(), FLEET))
    sides: dict[str, Callable[[], FleetTimes]] = {
        CLASSIC: lambda: _run_avalanche(python, folder, "classic", tasks),
        MEMORY: lambda: _run_avalanche(python, folder, "memory", tasks),
    }
    mas, slnid = make_runs(NoSparsifier(), tasks), make_runs(SLNID(1e-3), tasks)
    bf16 = [dataclasses.replace(run, precision="bf16") for run in mas]
    for name, runs in (("selfless MAS", mas), ("selfless MAS + SLNID", slnid), ("selfless MAS in bf16", bf16)):
        fleet = f"{name}, a run in a fleet of {FLEET}"
        split = f"{fleet}, {workers} worker{'s' * (workers > 1)}"
        sides |= {
            f"{name}, one run": lambda runs=runs: time_fleet(runs[:1], plan.data_dir),  # type: ignore[misc]
            f"{fleet}, one process": lambda runs=runs: time_fleet(runs, plan.data_dir),  # type: ignore[misc]
            split: lambda runs=runs: time_split_fleet(runs, workers, plan.data_dir),  # type: ignore[misc]
        }
    return sides


def make_runs(sparsify: Sparsifier, tasks: int) -> list[Run]:
    """Return the runs of our fleet: Avalanche's settings, one epoch, FLEET seeds."""
    base = Run(model=f"mlp-{HIDDEN}", preserve=MAS(STRENGTH), sparsify=sparsify, tasks=tasks, epochs=1, batch=BATCH)
    return [dataclasses.replace(base, lr=LR, momentum=MOMENTUM, seed=s) for s in range(FLEET)]


def _run_avalanche(python: Path, folder: Path, loading: str, tasks: int) -> FleetTimes:
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
    return _run_script(python, "avalanche_mas.py", settings)


# ----------------------------------------------------------------------------------------------------------- Fisher information
def _fisher_rows(plan: Plan, python: Path) -> list[Row]:
    """Compare our closed forms of the Fisher information with van de Ven's way: a loop over samples in batches of one."""
    samples, workload = 100 if plan.quick else 2_000, mlp(HIDDEN)
    model, (x, y) = build_network(workload, CPU), random_samples(workload, 10 * samples, CPU)
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    rows = []
    for labels, fisher in (("true", "empirical"), ("all", "exact")):
        plan.say(f"Fisher information, {fisher}")
        theirs, ours = list[dict[str, Any]](), list[float]()
        for _ in range(1 if plan.quick else 3):
            settings = {"samples": samples, "hidden": HIDDEN, "labels": labels, "threads": torch.get_num_threads()}
            theirs.append(_run_script(python, "per_sample_fisher.py", settings))
            start = time.perf_counter()
            importance.ewc(model, batches, fisher=fisher)  # type: ignore[arg-type]
            ours.append(time.perf_counter() - start)
        loop, closed = min(t["seconds_per_sample"] for t in theirs), min(ours) / len(x)
        title = f"Fisher ({fisher}), {workload.title}, a sample"
        rate = f"{format_number(1 / loop)} samples/s"
        rows.append(make_row(f"{title}, loop over samples", loop, rate=rate, samples=samples, rounds=theirs))
        rate, says = f"{format_number(1 / closed)} samples/s", f"{format_number(loop / closed)}× as fast as the loop over samples"
        rows.append(make_row(f"{title}, selfless", closed, rate=rate, says=says, times_loop=loop / closed, rounds=ours))
    return rows


def _run_script(python: Path, script: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Run a script in the peers' environment and return the JSON object that it prints."""
    words = [str(w) for name, value in settings.items() for w in (f"--{name}", value)]
    command = [str(python), str(PEERS / script), *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result
