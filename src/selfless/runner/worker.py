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
from selfless.runner.local import train_fleet
from selfless.runner.options import TrainOptions
from selfless.runner.store import Store
from selfless.spec import Run
from selfless.workers import Send, serve


def train_job(job: dict[str, Any], send: Send) -> None:
    """Train the fleet of one job. An error that a user can correct is sent as a message; any other ends the process with a traceback."""
    sys.path += [entry for entry in job["path"] if entry not in sys.path]
    warnings.showwarning = lambda message, *_, **__: send(warning=str(message))  # the parent warns, once for all workers
    try:
        for name in job["trusted"]:
            trust(name)
        unpack_streams(job["streams"])
        runs = [Run.from_dict(values) for values in job["runs"]]

        def follow(members: Sequence[Run], event: Event) -> None:
            send(event=dataclasses.asdict(event), members=[runs.index(run) for run in members])

        options = TrainOptions(
            device="cpu",
            data_dir=job["data_dir"],
            parents=job["parents"],
            budget=job["budget"],
            force=job["force"],
            follow=follow,
            waiting=lambda run: send(waiting=runs.index(run)),
        )
        train_fleet(runs, Store(job["out"], options.data_dir, checkpoints=job["checkpoints"]), options)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        send(error=str(error), is_data_error=isinstance(error, DataError))
    except Exception as error:
        if own_place(error) is None:
            raise
        send(error=describe_error(error), is_data_error=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        serve(train_job)
