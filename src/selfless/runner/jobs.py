"""Fleets as jobs for workers, of this machine or of a cluster: what a job holds, what a worker answers, and what happens when it dies.

A job is one JSON object: the settings of its runs, and where to record them. A fleet whose worker dies is tried once more. If that worker
dies, too, the fleet is split in halves, so that a run cannot keep others from being trained; a single run is recorded as failed.
"""

from __future__ import annotations

import math
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from selfless.data import DataError
from selfless.engine.progress import Event
from selfless.inputs import describe_error, own_place
from selfless.runner.given import pack_streams
from selfless.runner.machine import machine
from selfless.runner.options import TrainOptions
from selfless.runner.plan import split_evenly
from selfless.runner.store import Store
from selfless.spec import Result, Run
from selfless.terms import Term

NO_MEMORY = ("out of memory", "can't allocate memory", "memory that is free now")  # in messages of PyTorch and of `train_fleet`


class Workers(Protocol):
    """Processes that do jobs: `selfless.workers.Pool` on this machine, `selfless.runner.cluster.Cluster` on many."""

    def run(
        self,
        jobs: Sequence[Mapping[str, Any]],
        receive: Callable[[int, dict[str, Any]], None],
        replace: Callable[[int, int | str], bool],
    ) -> None:
        """Do all jobs. Call `receive(number of the job, message)`; if a worker dies, `replace(number, exit status or reason)`."""


def train_jobs(parts: Sequence[list[Run]], workers: Workers, store: Store, options: TrainOptions) -> dict[Run, Result]:
    """Train the fleets in workers, which record the results; return those of runs that failed because their worker died."""
    failed: dict[Run, Result] = {}
    with tempfile.TemporaryDirectory(prefix="selfless-") as folder:
        shared = shared_fields([run for runs in parts for run in runs], store, options) | {
            "streams": pack_streams([run for runs in parts for run in runs], Path(folder))
        }
        while parts:
            lost = _Lost(parts, store, failed)
            jobs = [shared | {"runs": [run.as_dict() for run in runs]} for runs in parts]
            workers.run(jobs, _receiver(parts, store, options, failed), lost.replace)
            parts = lost.halves
    return failed


def shared_fields(runs: Sequence[Run], store: Store, options: TrainOptions) -> dict[str, Any]:
    """Return the fields that all jobs of a study share."""
    return {
        "out": str(store.out.resolve()),
        "checkpoints": store.checkpoints,
        "device": options.device,
        "data_dir": str(options.data_dir or ""),
        "parents": str(options.parents.resolve()) if options.parents else "",
        "budget": options.budget,
        "deterministic": options.deterministic,
        "force": options.force,
        "path": [entry for entry in sys.path if entry],
        "trusted": sorted({kind.spelling() for run in runs for kind in term_kinds(run) if kind.is_custom()}),
    }


def _receiver(
    parts: Sequence[list[Run]], store: Store, options: TrainOptions, failed: dict[Run, Result]
) -> Callable[[int, dict[str, Any]], None]:
    """Return the function that takes the messages of workers.

    An error of a worker is raised, which stops all of them, unless it can only be the fault of a method that other fleets do not have.
    """

    def receive(job: int, message: dict[str, Any]) -> None:
        runs = parts[job]
        if "waiting" in message and options.waiting is not None:
            options.waiting(runs[message["waiting"]])
        if "warning" in message:
            warnings.warn(message["warning"], stacklevel=7)  # points at the caller of `train`
        if "error" in message:
            error = (DataError if message["is_data_error"] else ValueError)(message["error"])
            if message["errno"] is not None or not is_only_theirs(error, runs, parts):
                raise error
            failed.update(fail_together(runs, error, store))
        if "event" in message:
            options.tell([runs[i] for i in message["members"]], Event(**message["event"]))
        if "records" in message:  # of a machine that does not share the folder of results
            for run in runs:
                store.adopt(run, message["records"].get(run.key, {}), again=options.force)
        if "failed" in message:
            failed.update(_record_failures(runs, message["failed"], store))

    return receive


class _Lost:
    """The fleets whose worker died. `halves` are those that are still to be trained."""

    def __init__(self, parts: Sequence[list[Run]], store: Store, failed: dict[Run, Result]) -> None:
        self.parts, self.store, self.failed = parts, store, failed
        self.deaths = Counter[int]()
        self.halves: list[list[Run]] = []

    def replace(self, job: int, how: int | str) -> bool:
        """Return True if a job whose worker died is to be done again; else its fleet is split, or its run is recorded as failed."""
        runs, reason = self.parts[job], how if isinstance(how, str) else _describe_exit(how)
        self.deaths[job] += 1
        if self.deaths[job] == 1:
            warnings.warn(f"{runs[0].method}: {reason}; it is tried once more", stacklevel=7)
            return True
        if len(runs) > 1:
            warnings.warn(f"{runs[0].method}: {reason}, twice; its {len(runs)} runs are trained in two halves", stacklevel=7)
            self.store.training(runs).unlink(missing_ok=True)
            self.halves += split_evenly(runs, 2)
        else:
            self.failed.update(_record_failures(runs, f"{reason}, twice", self.store))
        return False


def _describe_exit(status: int) -> str:
    killed = " (killed, perhaps for want of memory)" if status == -signal.SIGKILL else ""
    return f"its worker process ended with status {status}{killed}"


def _record_failures(runs: Sequence[Run], reason: str, store: Store) -> dict[Run, Result]:
    """Record the runs that have no result yet as failed; return what was recorded."""
    return {run: record_failure(run, reason, store) for run in runs if store.load(run) is None}


def record_failure(run: Run, reason: str, store: Store) -> Result:
    """Record a run that ended without a result of its own, and return what was recorded."""
    unknown = np.full((1, 1), math.nan)
    made_from = store.made_from(run)  # without it the record would count as one of other data
    about = machine() | ({"made_from": made_from} if made_from else {})
    result = Result(run, unknown, unknown[0], [], [], status="failed", error=reason, about=about)
    with store.lock([run], lambda run: None):
        Store(store.out, store.data_dir, checkpoints=False).record(result, dict)
    return result


def is_only_theirs(error: Exception, runs: Sequence[Run], parts: Sequence[Sequence[Run]]) -> bool:
    """Return True if an error ends this fleet alone: its runs have a method of the user's, which some other fleet does not have.

    Missing data, a full disk and too little memory are no fault of a method: what was learned is kept, and the same command goes on.
    """
    kinds = custom_kinds(runs)
    elsewhere = isinstance(error, DataError | OSError | MemoryError) or any(words in str(error) for words in NO_MEMORY)
    return bool(kinds) and not elsewhere and any(not custom_kinds(other) & kinds for other in parts)


def fail_together(runs: Sequence[Run], error: Exception, store: Store) -> dict[Run, Result]:
    """Record the runs of a fleet that ended with an error as failed, and forget its state; return what was recorded."""
    store.training(runs).unlink(missing_ok=True)
    return _record_failures(runs, describe_error(error) if own_place(error) else str(error), store)


def custom_kinds(runs: Sequence[Run]) -> set[type[Term]]:
    """Return the user's own classes among the methods of some runs."""
    return {kind for run in runs for kind in term_kinds(run) if kind.is_custom()}


def term_kinds(run: Run) -> set[type[Term]]:
    """Return the classes of the terms of a run."""
    return {type(term) for term in (*run.preserve.parts, *run.sparsify.parts)}
