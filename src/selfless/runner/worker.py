"""A worker process: trains one fleet after another in one thread and reports every epoch to its parent, `selfless.runner.local`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from selfless.data import DataError
from selfless.engine.progress import Event
from selfless.inputs import describe_error, own_place, trust
from selfless.runner.given import unpack_streams
from selfless.runner.jobs import custom_kinds
from selfless.runner.local import train_fleet
from selfless.runner.options import TrainOptions
from selfless.runner.store import Store
from selfless.spec import Run
from selfless.workers import Send, serve


def train_job(job: dict[str, Any], send: Send) -> None:
    """Train the fleet of one job. An error that a user can correct is sent as a message; any other ends the process with a traceback."""
    warnings.showwarning = lambda message, *_, **__: send(warning=str(message))  # the parent warns, once for all workers
    runs: list[Run] = []
    try:
        runs = read_runs(job)
        unpack_streams(job["streams"])

        def follow(members: Sequence[Run], event: Event) -> None:
            send(event=dataclasses.asdict(event), members=[runs.index(run) for run in members])

        options = TrainOptions(
            device=job["device"],
            data_dir=job["data_dir"],
            parents=job["parents"],
            budget=job["budget"],
            deterministic=job["deterministic"],
            force=job["force"],
            follow=follow,
            waiting=lambda run: send(waiting=runs.index(run)),
        )
        train_fleet(runs, Store(job["out"], options.data_dir, checkpoints=job["checkpoints"]), options)
    except Exception as error:
        send(**describe_failure(error, bool(custom_kinds(runs))))


def read_runs(job: dict[str, Any]) -> list[Run]:
    """Return the runs of a job, whose networks and methods are found where its sender finds them."""
    sys.path += [entry for entry in job["path"] if entry not in sys.path]
    for name in job["trusted"]:
        trust(name)
    return [Run.from_dict(values) for values in job["runs"]]


def describe_failure(error: Exception, custom: bool = False) -> dict[str, Any]:
    """Return the message for an error that a user can correct; raise any other again. `errno` tells a full disk from other errors.

    custom   the runs have a method of the user's, so that any error may be its fault
    """
    about = {"is_data_error": isinstance(error, DataError), "errno": getattr(error, "errno", None)}
    if own_place(error) is not None:
        return about | {"error": describe_error(error)}
    if isinstance(error, ValueError | TypeError | RuntimeError | OSError):
        return about | {"error": str(error)}
    if custom:
        return about | {"error": describe_error(error)}
    raise error


if __name__ == "__main__":
    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        serve(train_job)
