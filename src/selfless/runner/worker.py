"""A worker process: one fleet from standard input, one thread, one JSON line an epoch on standard output."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from selfless.data import DataError
from selfless.engine.progress import Event
from selfless.runner.local import train_fleet
from selfless.runner.store import Store
from selfless.spec import Run


def main() -> None:
    import torch

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # another worker failed: locks are let go in order
    torch.set_num_threads(1)
    job = json.loads(sys.stdin.read())
    sys.path += [entry for entry in job["path"] if entry not in sys.path]
    lines = os.fdopen(os.dup(1), "w")  # messages go there; what anybody's network prints goes to standard error
    os.dup2(2, 1)
    runs = [Run.from_dict(r) for r in job["runs"]]
    parent = os.getppid()

    def say(**message: Any) -> None:
        if os.getppid() != parent:
            os._exit(1)  # nobody listens any more; the state is on disk
        print(json.dumps(message), file=lines, flush=True)

    warnings.showwarning = lambda message, *_, **__: say(warning=str(message))  # our parent warns, once for all workers

    def watch(members: Sequence[Run], event: Event) -> None:
        say(event=dataclasses.asdict(event), members=[runs.index(r) for r in members])

    try:
        data_dir = job["data_dir"] or None
        store = Store(job["out"], data_dir, checkpoints=job["checkpoints"])
        train_fleet(runs, store, "cpu", data_dir, job["budget"], watch, lambda run: say(waiting=run.key), job["force"])
    except (ValueError, RuntimeError, OSError) as error:
        say(error=str(error), data=isinstance(error, DataError))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main()
