"""Notes about training that another process can read: what a study wants to train, and where each of its fleets is.

    <out>/study-<host>-<process>-<n>.json      the runs of one call of `train`; removed at its end, or kept with the reason why it stopped
    <out>/<key>/training-<fleet>.json          the last event of a fleet, in the folder of its first member; removed when it ends

`selfless.runner.study` reads them. A note is written at most once a second, and writing takes at most a twentieth of the time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from selfless.engine.progress import Event
from selfless.files import is_running, write_text
from selfless.inputs import check_note
from selfless.runner.store import Store
from selfless.spec import Run

PAUSE = 1.0  # seconds between two notes of a fleet, at least
WRITING = 0.05  # the share of the time that writing notes may take
SILENT = 30.0  # seconds without a sign after which a process counts as ended if it does not exist here, where it may be invisible
LOST = 900.0  # the same for a process of another machine
_numbers = itertools.count()


def where() -> dict[str, Any]:
    """Return who writes a note, and when."""
    return {"host": socket.gethostname(), "processes": _processes(), "process": os.getpid(), "updated": time.time()}


def _processes() -> str:
    """Return a name for the processes that this one can see: two containers may have one host name and different ones; "" if unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_alive(note: dict[str, Any], changed: float) -> bool:
    """Return whether the writer of a note still runs. `changed` is when the note, or another of the same writer, was last written."""
    silent = time.time() - changed
    is_here = note["host"] == socket.gethostname()
    is_visible = is_here and note.get("processes", "") == _processes() != ""
    if is_visible or (is_here and silent >= SILENT):
        return is_running(note["process"])
    return silent < LOST


class FleetNote:
    """The note of a fleet that trains in this process. A context manager, which removes the note at its end."""

    def __init__(self, runs: Sequence[Run], store: Store) -> None:
        self.path = store.training(runs).with_suffix(".json")
        self.runs = [describe(run) for run in runs]
        self.next = 0.0

    def write(self, event: Event) -> None:
        """Write the event, unless the last one was written less than PAUSE seconds ago."""
        started = time.perf_counter()
        if started < self.next:
            return
        write_text(self.path, json.dumps(where() | {"runs": self.runs, "event": _finite(dataclasses.asdict(event))}) + "\n")
        now = time.perf_counter()
        self.next = now + max(PAUSE, (now - started) / WRITING)

    def __enter__(self) -> FleetNote:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.path.unlink(missing_ok=True)


def describe(run: Run) -> dict[str, Any]:
    """Return what a reader shows of a run, without importing its method."""
    return {"key": run.key, "method": run.method, "stream": run.stream, "model": run.model, "seed": run.seed}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity in lists of numbers by None, also in tables of lists: they are not JSON."""

    def clean(value: Any) -> Any:
        return _finite(value) if isinstance(value, dict) else [x if math.isfinite(x) else None for x in value]

    return {k: clean(v) if isinstance(v, dict | list) else v for k, v in values.items()}


@contextlib.contextmanager
def announced(runs: Sequence[Run], store: Store) -> Iterator[None]:
    """Inside `with`: a note says that these runs are to be trained. After an error it stays, with the reason, if anything was trained."""
    is_new = not store.out.exists()
    remove_old(runs, store)
    host = re.sub(r"[^\w.]", "_", socket.gethostname())
    path = store.out / f"study-{host}-{os.getpid()}-{next(_numbers)}.json"
    note = where() | {"started": time.time(), "runs": [describe(run) for run in runs]}
    write_text(path, json.dumps(note) + "\n")
    try:
        yield
    except BaseException as error:
        if any(store.folder(run).exists() for run in runs):
            reason = "stopped by the user" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
            with contextlib.suppress(OSError):  # the disk may be full, which is the reason then
                write_text(path, json.dumps(note | where() | {"ended": reason}) + "\n")
        else:
            path.unlink(missing_ok=True)
            if is_new:  # a refused run leaves no empty folder
                with contextlib.suppress(OSError):
                    store.out.rmdir()
        raise
    path.unlink(missing_ok=True)


def remove_old(runs: Sequence[Run], store: Store) -> None:
    """Remove the notes of studies that ended and whose runs are recorded or about to be trained again."""
    planned = {run.key for run in runs}
    for path in store.out.glob("study-*.json"):
        note = read_note(path)
        if note is None or ("ended" not in note and is_alive(note, 0.0 if note["host"] == socket.gethostname() else note["updated"])):
            continue
        if all(run["key"] in planned or store.has(run["key"]) for run in note["runs"]):
            path.unlink(missing_ok=True)


def read_note(path: Path) -> dict[str, Any] | None:
    """Return a note; None if it was removed in the meantime, or is none of ours."""
    try:
        note: dict[str, Any] = json.loads(path.read_bytes())
        check_note(note, path.name.startswith("training-"))
        return note | {"runs": [{name: run[name] for name in ("key", "method", "stream", "model", "seed")} for run in note["runs"]]}
    except (OSError, ValueError, RecursionError):
        return None
