"""Train fleets on this machine: in this process on a GPU or for one run, in worker processes on a CPU.

A step of a small network is too short to be split between threads, so a CPU runs one process per core. A worker process
(`selfless.runner.worker`) trains one fleet at a time, reports every epoch, and records its results itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch

from selfless.data import holding, name_stream
from selfless.engine.build import CannotShareFleet
from selfless.engine.checkpoint import is_out_of_memory
from selfless.engine.determinism import deterministic as exact
from selfless.engine.learner import Learner
from selfless.engine.progress import Event
from selfless.network.given import is_unnamed, name_network
from selfless.runner.checks import check_runs
from selfless.runner.continuing import find_parent
from selfless.runner.given import can_travel, check_objects
from selfless.runner.jobs import fail_together, is_only_theirs, term_kinds, train_jobs
from selfless.runner.live import FleetNote, announced, remove_old
from selfless.runner.machine import core_count, machine, resolve_device, suitable_threads
from selfless.runner.memory import available, parts_that_fit
from selfless.runner.options import TrainOptions, Watch
from selfless.runner.plan import fleets, split_evenly
from selfless.runner.store import Store
from selfless.spec import Result, Run
from selfless.workers import Pool


@overload
def train(runs: Run, *, stream: Any = ..., model: Any = ..., out: Path | str | None = ..., **options: Any) -> Result: ...
@overload
def train(runs: Sequence[Run], *, stream: Any = ..., model: Any = ..., out: Path | str | None = ..., **options: Any) -> list[Result]: ...
def train(  # type: ignore[misc]  # the options of the overloads are those below
    runs: Run | Sequence[Run],
    *,
    stream: Any = None,
    model: Any = None,
    out: Path | str | None = None,
    device: str = "auto",
    workers: int | None = None,
    data_dir: Path | str | None = None,
    parents: Path | str | None = None,
    budget: int | None = None,
    force: bool = False,
    checkpoints: bool = True,
    deterministic: bool = False,
    watch: Watch | None = None,
    follow: Watch | None = None,
    waiting: Callable[[Run], None] | None = None,
    engine: str = "local",
    address: str | None = None,
) -> Result | list[Result]:
    """Train one run or many: return a Result for a Run, a list in the same order for a list.

    Runs that differ only in numbers (seed, strengths, σ, lr, epochs), in the sparsifier, or in preservers whose steps are the same (MAS and
    EWC) train together as one fleet, or as several fleets if one would not fit into memory.

    stream        the stream of all runs, in place of their own: a name, a Stream, or a list of tasks (train, test)
    model         the network of all runs: a name, a function that makes it, or an nn.Module, whose weights every run starts from
    out           folder where results are recorded and looked up; None: nothing is recorded
    device        "auto" (a GPU if there is one), "cpu", "cuda", …
    workers       processes on a CPU; default: one per core, at most one per run
    data_dir      folder with data sets; default: $SELFLESS_DATA, else the user's cache
    parents       folder with the finished runs that runs continue; default: `out`
    budget        bytes of data to keep in memory; larger data is read from a memory map
    force         train runs again that are already recorded
    checkpoints   also record trained parameters and importances
    deterministic   the same bits in every training on one GPU, with slower algorithms; on a CPU they are the same anyway
    watch         called with (runs of the fleet, Event) after every epoch and task
    follow        called as `watch`, and also at the start of every epoch and about twice a second within one (Event.passing)
    waiting       called with a run that another process is training, before waiting for it
    engine        "local": this machine; "ray": the nodes of a Ray cluster (docs/scale.md)
    address       the Ray cluster: "auto" on one of its machines, HOST:PORT; default: $RAY_ADDRESS, else a Ray of its own on this machine
    """
    options = TrainOptions(
        out=out,  # type: ignore[arg-type]  # text becomes a path
        device=device,
        workers=workers,
        data_dir=data_dir,  # type: ignore[arg-type]
        parents=parents,  # type: ignore[arg-type]
        budget=budget,
        force=force,
        checkpoints=checkpoints,
        deterministic=deterministic,
        watch=watch,
        follow=follow,
        waiting=waiting,
        engine=engine,
        address=address,
    )
    given = {  # the names are found once for all runs, and the objects are kept while they train
        "stream": None if stream is None else name_stream(stream),
        "model": None if model is None else name_network(model),
    }
    changes = {field: named[0] for field, named in given.items() if named is not None}
    listed = [runs] if isinstance(runs, Run | str) else list(runs)
    wrong = next((run for run in listed if not isinstance(run, Run)), None)
    if wrong is not None:
        raise TypeError(f"train takes a Run or a list of runs, not {wrong!r}; write selfless.train(Run(...))")
    several = [run.replace(**changes) for run in listed]
    results = train_runs(several, options)
    _warn_failed(results)
    return results[0] if isinstance(runs, Run) else results


def _warn_failed(results: Sequence[Result]) -> None:
    """Warn once about runs that failed. A command prints every one of them instead."""
    failed = [result for result in results if result.status != "done"]
    if failed:
        run, several = failed[0].run, f"{len(failed)} of {len(results)} runs failed; the first: " if len(failed) > 1 else ""
        message = f"{several}run {run.key} ({run.method}, seed {run.seed}) failed: {failed[0].error}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def train_runs(runs: Sequence[Run], options: TrainOptions) -> list[Result]:
    """Train the runs that are not recorded yet; return the results of all, in the same order."""
    _check_importable(runs, options)
    check_objects(runs)
    with contextlib.ExitStack() as stack:
        options = dataclasses.replace(options, parents=options.parents or options.out)
        out = options.out or stack.enter_context(tempfile.TemporaryDirectory(prefix="selfless-"))
        store = Store(out, options.data_dir, checkpoints=options.checkpoints)
        unique = list(dict.fromkeys(runs))
        missing = [run for run in unique if options.force or is_unnamed(run.model) or store.load(run) is None]
        trained: dict[Run, Result] = {}
        if missing:
            trained = (_train_on_cluster if options.engine == "ray" else _train_here)(missing, unique, store, options)
        if options.out is not None:
            remove_old(unique, store)
            store.tidy(unique)
        results = {run: trained.get(run) or store.load(run) for run in unique}  # another process may train again what we recorded
        if options.out is None:  # the folder is temporary
            results = {run: None if r is None else _keep_weights(r) for run, r in results.items()}
    found = [results[run] for run in runs]
    assert all(r is not None for r in found), "every run was trained or raised"
    return found  # type: ignore[return-value]


def _train_here(missing: list[Run], wanted: list[Run], store: Store, options: TrainOptions) -> dict[Run, Result]:
    """Train the missing runs on this machine; return the results that this process knows."""
    with contextlib.ExitStack() as held:
        held.enter_context(holding())  # every fleet needs the same images
        options = dataclasses.replace(options, device=resolve_device(options.device))
        check_runs(missing, options)
        parts, processes = _divide(missing, wanted, store, options)
        if processes > 1:
            held.close()  # each worker loads them
        with announced(missing, store):
            if processes > 1:
                return train_jobs(parts, Pool([sys.executable, "-m", "selfless.runner.worker"], processes), store, options)
            return _train_in_turn(parts, store, options)


def _train_in_turn(parts: Sequence[list[Run]], store: Store, options: TrainOptions) -> dict[Run, Result]:
    """Train fleets one after another in this process. A method of the user's that raises fails alone, if there are others."""
    found: dict[Run, Result] = {}
    for runs in parts:
        try:
            found |= {result.run: result for result in train_fleet(runs, store, options)}
        except Exception as error:
            if not is_only_theirs(error, runs, parts):
                raise
            found |= fail_together(runs, error, store)
    return found


def _train_on_cluster(missing: list[Run], wanted: list[Run], store: Store, options: TrainOptions) -> dict[Run, Result]:
    """Train the missing runs on the nodes of a Ray cluster; return the results that this process knows."""
    from selfless.runner.cluster import train_on_cluster

    check_runs(missing, dataclasses.replace(options, device="cpu"))  # a program that only sends jobs may run where there is no GPU
    stopped, rest = ([], missing) if options.force else _stopped_fleets(missing, wanted, store)
    with announced(missing, store):
        return train_on_cluster(stopped, rest, store, options)


def _keep_weights(result: Result) -> Result:
    """Return the result with its weights in memory."""
    if not isinstance(result.weights, Path):
        return result
    from safetensors.torch import load_file

    return dataclasses.replace(result, weights=load_file(result.weights))


def _check_importable(runs: Sequence[Run], options: TrainOptions) -> None:
    """Raise ValueError for custom terms that records and worker processes could not import."""
    kinds = {kind for run in runs for kind in term_kinds(run)}
    hidden = [kind.__name__ for kind in kinds if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__]
    if hidden and (options.engine == "ray" or options.out is not None or (options.workers != 1 and len(runs) > 1)):
        raise ValueError(
            f"{min(hidden)} is defined in the main program or inside a function, where records and worker processes cannot import it; "
            "put it into a separate module (mine.py), or train without out= and with workers=1"
        )


def _divide(missing: list[Run], wanted: list[Run], store: Store, options: TrainOptions) -> tuple[list[list[Run]], int]:
    """Return (the fleets to train, the number of processes)."""
    stopped, rest = ([], missing) if options.force else _stopped_fleets(missing, wanted, store)
    processes = max(1, min(options.workers or core_count(), len(rest) + len(stopped))) if options.device == "cpu" else 1
    processes = processes if processes == 1 or can_travel(missing) else 1
    parts = [part for group in fleets(rest) for part in parts_that_fit(group, options, processes)]
    return stopped + [fleet for part in parts for fleet in split_evenly(part, processes)], processes


def _stopped_fleets(missing: list[Run], wanted: list[Run], store: Store) -> tuple[list[list[Run]], list[Run]]:
    """Return (the interrupted fleets that contain missing runs, the missing runs that are in none of them)."""
    known, keys_left = {run.key: run for run in wanted}, {run.key for run in missing}
    found: list[list[Run]] = []
    for _, keys in store.unfinished():
        if all(key in known for key in keys) and keys_left & set(keys):
            found.append([known[key] for key in keys])
            keys_left -= set(keys)
    return found, [run for run in missing if run.key in keys_left]


def train_fleet(runs: list[Run], store: Store, options: TrainOptions) -> list[Result]:
    """Train one fleet in this process, record its members and return their results, except those that another process recorded first.

    If the fleet does not fit into memory, or its members cannot train together, it is split in halves.
    """
    with store.lock(runs, options.waiting or (lambda run: None)):
        if options.force or is_unnamed(runs[0].model):
            store.training(runs).unlink(missing_ok=True)
            for run in runs:
                store.clear(run)
        todo = [run for run in runs if store.load(run) is None]
        if not todo:
            store.training(runs).unlink(missing_ok=True)
            return []
        if not store.training(runs).exists():  # nothing to continue: train only the members that are not recorded
            runs = todo
        if not store.training(runs).exists():
            for run in todo:
                store.clear(run)  # an old result of changed data or a changed network
        parts, recorded = [runs], list[Result]()
        while parts:
            part = parts.pop(0)
            was_stopped = store.training(part).exists()
            try:
                recorded += _train_part(part, todo, store, options)
                continue
            except CannotShareFleet as error:
                if len(part) == 1:
                    raise
                if len(part) == len(runs):
                    warnings.warn(str(error), stacklevel=7)  # points at the caller of `train`
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if was_stopped and store.training(part).exists():
                    raise RuntimeError(
                        f"{len(part)} stopped {'run does' if len(part) == 1 else 'runs do'} not fit in the memory that is free now "
                        f"({error}). What they have learned is kept: free memory on this device and give the same command again, or start "
                        "anew with force=True (--force)"
                    ) from None
            # Outside of `except`, the exception no longer keeps the fleet in memory.
            gc.collect()
            torch.cuda.empty_cache()
            store.training(part).unlink(missing_ok=True)
            parts[:0] = _halves(part, options.device)
        return recorded


def _train_part(runs: list[Run], todo: list[Run], store: Store, options: TrainOptions) -> list[Result]:
    """Train the runs as one fleet and record those in `todo`. The caller has locked them."""
    sources = [store.made_from(run) for run in runs]

    def report(event: Event) -> None:
        note.write(event)
        if not event.passing:
            for m, run in enumerate(runs):
                line = {"task": event.task + 1, "epoch": event.epoch, "evaluated": event.evaluated, "accuracy": event.accuracy[m]}
                store.log(run, line | ({"loss": event.loss[m] if math.isfinite(event.loss[m]) else None} if event.loss else {}))
        options.tell(runs, event)

    with suitable_threads(runs[0], options.device), exact(options.deterministic), FleetNote(runs, store) as note:
        report(Event(0, 0, "", 0, 0, [], [], passing=True, stage="loading the data"))
        learner = Learner(
            runs,
            device=options.device,
            data_dir=options.data_dir,
            budget=options.budget,
            checkpoint=store.training(runs),
            stamp=json.dumps(sources) if any(sources) else "",
            parent=find_parent(runs[0], options),
            report=report,
        )
        if learner.resumed:
            for m, run in enumerate(runs):
                store.restore_log(run, learner.log_lines(m))
        learner.learn()
        about = machine()
    recorded = []
    for m, result in enumerate(learner.results()):
        if result.run in todo:
            made_from = {"made_from": sources[m]} if sources[m] else {}
            result = dataclasses.replace(result, about=result.about | about | made_from)
            recorded.append(store.record(result, partial(learner.member_tensors, m)))
    store.training(runs).unlink(missing_ok=True)
    return recorded


def _halves(runs: list[Run], device: str) -> list[list[Run]]:
    """Split a fleet in two; raise ValueError for a single run."""
    if len(runs) == 1:
        free = (available(device) or 0) / 1e9
        raise ValueError(
            f"one run of {runs[0].model} at batch {runs[0].batch} does not fit into the memory of {device} ({free:.1f} GB free); "
            "use a smaller --batch, --precision bf16, or --device cpu"
        )
    return list(split_evenly(runs, 2))
