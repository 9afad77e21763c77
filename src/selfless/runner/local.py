"""Fleets on this machine: in this process on a GPU or for one run, in worker processes of one thread each on a CPU.

A step of a small network is too short for two threads to share (they lose more in waiting than they win), so a CPU is filled with one
process a core. A worker (`selfless.runner.worker`) gets its runs as JSON on standard input; it answers with one JSON line an epoch and
writes its results itself. When its parent is gone it stops: what it had is on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

from selfless.data import DataError, holding
from selfless.engine.learner import Alone, Event, Learner
from selfless.preserve import Preserver
from selfless.runner.memory import available, most
from selfless.runner.store import Store
from selfless.spec import Result, Run

Watch = Callable[[Sequence[Run], Event], None]


@overload
def train(runs: Run, *, out: Path | str | None = ..., **options: Any) -> Result: ...
@overload
def train(runs: Sequence[Run], *, out: Path | str | None = ..., **options: Any) -> list[Result]: ...
def train(  # type: ignore[misc]  # the options of the overloads are those below
    runs: Run | Sequence[Run],
    *,
    out: Path | str | None = None,
    device: str = "auto",
    workers: int | None = None,
    data_dir: Path | str | None = None,
    budget: int | None = None,
    force: bool = False,
    checkpoints: bool = True,
    watch: Watch | None = None,
    waiting: Callable[[Run], None] | None = None,
) -> Result | list[Result]:
    """Train one run or many; a Result for a Run, a list in the same order for a list.

    Runs that differ only in numbers (seed, strengths, σ, lr, epochs) and in the sparsifier train together as one fleet, or as several
    where one would not fit into memory.

    out       where results are recorded and looked up (None: nothing is kept); `force` trains again what is there
    device    "auto" (a GPU if there is one), "cpu", "cuda", …
    workers   processes on a CPU; default one a core, at most one a run
    budget    bytes of data to keep in memory; what is larger streams from a memory map
    checkpoints   whether trained parameters and importances are recorded with the numbers
    watch     called with (runs of the fleet, Event) after every epoch and task
    """
    single = isinstance(runs, Run)
    wanted = [runs] if isinstance(runs, Run) else list(runs)
    _importable(wanted, out, workers)
    with contextlib.ExitStack() as cleaning:
        place = out if out is not None else cleaning.enter_context(tempfile.TemporaryDirectory(prefix="selfless-"))
        store = Store(place, data_dir, checkpoints=checkpoints and out is not None)
        unique = list(dict.fromkeys(wanted))
        missing = [run for run in unique if force or store.load(run) is None]
        trained: dict[Run, Result] = {}
        if missing:
            cleaning.enter_context(holding())  # each fleet needs the same images again
            trained = _execute(missing, unique, store, resolve_device(device), workers, data_dir, budget, watch, waiting, force)
        results = {run: trained.get(run) or store.load(run) for run in unique}  # another process may just be training again what we did
    found = [results[run] for run in wanted]
    assert all(r is not None for r in found), "every run was trained or raised"
    return found[0] if single else found  # type: ignore[return-value]


def _importable(runs: Sequence[Run], out: Path | str | None, workers: int | None) -> None:
    """Results and other processes name a method of one's own by its module."""
    kinds = {type(term) for run in runs for term in (run.preserve, run.sparsify)}
    lost = [kind.__name__ for kind in kinds if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__]
    if lost and (out is not None or (workers != 1 and len(runs) > 1)):
        raise ValueError(
            f"{min(lost)} is defined in the program that runs, or within a function, where records and worker processes cannot find it; "
            "put it into a module of its own (mine.py), or train without out= and with workers=1"
        )


def resolve_device(device: str) -> str:
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for, but this machine has no usable GPU; use --device cpu")
    return device


def fleets(runs: Sequence[Run], most: int | None = None) -> list[list[Run]]:
    """Runs that may train as one, together; at most `most` in a fleet. Members with the same sparsifier are neighbours."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_common(run), []).append(run)
    made = []
    for group in groups.values():
        group.sort(key=lambda r: repr(dataclasses.replace(r.sparsify, strength=0.0)))
        size = len(group) if most is None else max(1, most)
        made += [group[i : i + size] for i in range(0, len(group), size)]
    return made


def _common(run: Run) -> str:
    """What the members of a fleet share, as text: everything but seed, strengths, lr, epochs, ramp and the sparsifier."""
    preserve: Preserver = run.preserve if run.preserve.alike else dataclasses.replace(run.preserve, strength=0.0)
    fields = run.as_dict() | {"preserve": repr(preserve), "sparsify": None, "seed": None, "lr": None, "epochs": None, "ramp": None}
    stream = run.stream.removeprefix("joint-")
    if stream.startswith(("folders:", "arrays:", "split-mnist", "blurred-mnist")):
        fields["seed"] = run.seed  # unbalanced classes: other seeds, other sizes of tasks
    if stream.startswith("blurred-") or ":" in run.model or run.model_options.get("batch_norm"):
        fields["epochs"] = run.epochs  # draws after the last epoch, or running statistics: a member cannot wait for the others
    if run.preserve.turns:
        fields["epochs"] = run.epochs  # phases of a task begin at the same epoch for all
    if run.schedule == "plateau" and (":" in run.model or run.model_options.get("batch_norm")):
        fields["key"] = run.key  # running statistics would go on after a member has stopped
    if run.model_options.get("dropout") or getattr(run.preserve, "fisher", "") == "sampled":
        fields["key"] = run.key  # draws from a generator that a fleet would share: such a run trains alone
    return json.dumps(fields, sort_keys=True)


# ------------------------------------------------------------------------------------------------------------------ executing
def _execute(
    runs: list[Run],
    wanted: list[Run],
    store: Store,
    device: str,
    workers: int | None,
    data_dir: Path | str | None,
    budget: int | None,
    watch: Watch | None,
    waiting: Callable[[Run], None] | None,
    force: bool,
) -> dict[Run, Result]:
    """Train what is missing; the results of fleets trained in this process (workers leave theirs in the store)."""
    stopped, runs = ([], runs) if force else _stopped(runs, wanted, store)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(workers or cores, len(runs) + len(stopped)) if device == "cpu" else 1
    at_most = partial(_at_most, device=device, data_dir=data_dir, budget=budget, shares=max(1, count))
    parts = stopped + [fleet for group in fleets(runs) for part in at_most(group) for fleet in _spread(part, max(1, count))]
    found: list[list[Result]] = []
    if count > 1:
        _in_workers(parts, count, store, data_dir, budget, watch, waiting, force)
    else:
        found = [train_fleet(fleet, store, device, data_dir, budget, watch, waiting, force) for fleet in parts]
    store.sweep()
    return {result.run: result for results in found for result in results}


def _at_most(group: list[Run], device: str, data_dir: Path | str | None, budget: int | None, shares: int) -> Iterator[list[Run]]:
    """A group that may train as one, in parts that fit into memory (together, where `shares` processes hold a part)."""
    if device == "cpu" and group[0].model.startswith(("cnn-", "vgg-", "alexnet")):
        yield from ([run] for run in group)  # stacking convolutions costs a CPU more than it saves (docs/performance.md)
        return
    place = Path(data_dir) if data_dir else None
    size = most(group, lambda runs: Learner(runs, device=device, data_dir=place, budget=budget), device)
    size = size if size >= len(group) else max(1, size // shares) * shares
    yield from (group[i : i + size] for i in range(0, len(group), size))


def _stopped(runs: list[Run], wanted: list[Run], store: Store) -> tuple[list[list[Run]], list[Run]]:
    """(the fleets that were stopped earlier and hold some of these runs, as they were; the runs in none of them)."""
    known, missing = {run.key: run for run in wanted}, {run.key for run in runs}
    found: list[list[Run]] = []
    for _, keys in store.unfinished():
        if all(key in known for key in keys) and missing & set(keys):
            found.append([known[key] for key in keys])
            missing -= set(keys)
    return found, [run for run in runs if run.key in missing]


def _spread(fleet: list[Run], count: int) -> Iterator[list[Run]]:
    """A fleet cut into `count` parts of nearly equal size, neighbours together."""
    size, more = divmod(len(fleet), count)
    start = 0
    for i in range(count):
        stop = start + size + (i < more)
        if stop > start:
            yield fleet[start:stop]
        start = stop


def train_fleet(
    runs: list[Run],
    store: Store,
    device: str,
    data_dir: Path | str | None = None,
    budget: int | None = None,
    watch: Watch | None = None,
    waiting: Callable[[Run], None] | None = None,
    force: bool = False,
) -> list[Result]:
    """Train one fleet here and record each member. If another process was quicker, its results are taken."""
    with store.lock(runs, waiting or (lambda run: None)):
        if force:
            store.training(runs).unlink(missing_ok=True)
            for run in runs:
                store.clear(run)
        todo = [run for run in runs if store.load(run) is None]
        place = store.training(runs)
        if not todo:
            place.unlink(missing_ok=True)
            return []
        if not place.exists():  # nothing to go on from: those that are done stay as they are
            runs = todo
            place = store.training(runs)
        for run in todo:
            if not place.exists():
                store.clear(run)  # of other data or another network

        return _trained(runs, todo, store, device, Path(data_dir) if data_dir else None, budget, watch)


def _trained(
    runs: list[Run], todo: list[Run], store: Store, device: str, data_dir: Path | None, budget: int | None, watch: Watch | None
) -> list[Result]:
    """Train a fleet whose locks are held; one that is too large for the memory after all, in halves."""
    place = store.training(runs)
    sources = [store.made_from(run) for run in runs]

    def report(event: Event) -> None:
        for m, run in enumerate(runs):
            line = {"task": event.task + 1, "epoch": event.epoch, "evaluated": event.evaluated, "accuracy": event.accuracy[m]}
            store.log(run, line | ({"loss": event.loss[m] if math.isfinite(event.loss[m]) else None} if event.loss else {}))
        if watch is not None:
            watch(runs, event)

    with _threads(runs[0], device):
        stamp = json.dumps(sources) if any(sources) else ""
        learner = _learnt(runs, report, device=device, data_dir=data_dir, budget=budget, checkpoint=place, stamp=stamp)
        about = machine()
    if learner is None:
        place.unlink(missing_ok=True)
        if len(runs) == 1:
            free = (available(device) or 0) / 1e9
            raise ValueError(
                f"one run of {runs[0].model} at batch {runs[0].batch} does not fit into the memory of {device} ({free:.1f} GB free); "
                "take a smaller --batch, --precision bf16, or --device cpu"
            )
        halves = runs[: (len(runs) + 1) // 2], runs[(len(runs) + 1) // 2 :]
        return [result for half in halves for result in _trained(half, todo, store, device, data_dir, budget, watch)]
    recorded = []
    for m, result in enumerate(learner.results()):
        if result.run in todo:
            made = {"made_from": sources[m]} if sources[m] else {}
            recorded.append(dataclasses.replace(result, about=result.about | about | made))
            store.record(recorded[-1], partial(learner.member_tensors, m))
    place.unlink(missing_ok=True)
    return recorded


def _learnt(runs: list[Run], report: Callable[[Event], None], **options: Any) -> Learner | None:
    """The fleet at its end, or None where it must be smaller: the memory does not suffice, or the members disturb each other."""
    import torch

    learner = None
    try:
        learner = Learner(runs, report=report, **options)
        learner.learn()
        return learner
    except Alone:
        if len(runs) == 1:
            raise
    except (RuntimeError, MemoryError) as error:
        if not _out_of_memory(error):
            raise
    learner = None  # what it held is free again before the next, smaller one is made
    gc.collect()
    torch.cuda.empty_cache()
    return None


def _out_of_memory(error: Exception) -> bool:
    import torch

    return isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


@contextlib.contextmanager
def _threads(run: Run, device: str) -> Iterator[None]:
    """One thread for a small perceptron, whose steps are too short to share: on a busy machine two are several times slower than one."""
    import torch

    before = torch.get_num_threads()
    width = run.model.split("-")[1] if run.model.startswith("mlp-") else ""
    if device == "cpu" and width.isdigit() and int(width) <= 512:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def machine() -> dict[str, Any]:
    """What the numbers were made with."""
    import torch

    from selfless import __version__

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "hardware": gpu or _cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "selfless": __version__,
        "commit": _commit(),
    }


def _cpu() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _commit() -> str:
    if os.environ.get("SELFLESS_COMMIT"):  # where the code was copied without its history
        return os.environ["SELFLESS_COMMIT"]
    try:
        here = Path(__file__).resolve().parent
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=here, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# ------------------------------------------------------------------------------------------------------------------- workers
def _in_workers(
    parts: list[list[Run]],
    count: int,
    store: Store,
    data_dir: Path | str | None,
    budget: int | None,
    watch: Watch | None,
    waiting: Callable[[Run], None] | None,
    force: bool,
) -> None:
    """Train the fleets in `count` worker processes; the first failure stops all."""
    lines: queue.Queue[tuple[int, str | None]] = queue.Queue()
    todo, running = list(enumerate(parts)), dict[int, tuple[subprocess.Popen[str], threading.Thread]]()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

    def start(number: int, runs: list[Run]) -> None:
        job: dict[str, Any] = {
            "runs": [r.as_dict() for r in runs],
            "out": str(store.out.resolve()),
            "data_dir": str(data_dir or ""),
            "budget": budget,
            "force": force,
            "checkpoints": store.checkpoints,
        }
        job["path"] = [entry for entry in sys.path if entry]
        child = subprocess.Popen(
            [sys.executable, "-m", "selfless.runner.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died already, and is heard of below
            child.stdin.write(json.dumps(job))
            child.stdin.close()
        listener = threading.Thread(target=_listen, args=(number, child, lines), daemon=True)
        listener.start()
        running[number] = (child, listener)

    try:
        while todo or running:
            while todo and len(running) < count:
                start(*todo.pop(0))
            number, line = lines.get()
            if line is not None:
                _relay(json.loads(line), parts[number], watch, waiting)
            elif running.pop(number)[0].wait() != 0:
                raise RuntimeError(f"the worker training {parts[number][0].method} stopped; its message is above")
    finally:
        for child, listener in running.values():
            child.terminate()
            child.wait()
            listener.join()


def _listen(number: int, child: subprocess.Popen[str], lines: queue.Queue[tuple[int, str | None]]) -> None:
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            lines.put((number, line))
    lines.put((number, None))


def _relay(message: dict[str, Any], runs: list[Run], watch: Watch | None, waiting: Callable[[Run], None] | None) -> None:
    if "waiting" in message and waiting is not None:
        waiting(runs[0])
    if "warning" in message:
        warnings.warn(message["warning"], stacklevel=5)  # who called train
    if "error" in message:
        raise (DataError if message.get("data") else ValueError)(message["error"])
    if "event" in message and watch is not None:
        watch([runs[i] for i in message["members"]], Event(**message["event"]))
