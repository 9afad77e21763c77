"""What a node of a Ray cluster does: find the data, measure how many runs fit, train a fleet, return its records.

The jobs are those of `selfless.runner.worker`. If the node sees the folder of results (a shared file system), it records there. If not, it
records in a scratch folder of its own, and the files of each record travel back through Ray's object store.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from selfless.data import DataError, holding
from selfless.engine.build import build_streams
from selfless.files import locked
from selfless.runner.memory import largest_fleet
from selfless.runner.options import TrainOptions
from selfless.runner.store import Store
from selfless.runner.worker import describe_failure, read_runs, train_job
from selfless.spec import Run

ARRIVE_SECONDS = 10.0  # how long a worker that has ended waits for its messages to arrive


def train_on_node(text: str, number: int, mailbox: Any) -> dict[str, Any]:
    """Train the fleet of a job; return {"node", "messages", "records"}: the errors and warnings, and the files of its results by key.

    text   the job as JSON, with the fields `study`, `marker`, `made_from` and `folder` of `selfless.runner.cluster`
    """
    import ray

    job, node = _enter(text)
    messages: list[dict[str, Any]] = []
    last_put = mailbox.put.remote(number, {"node": node})

    def send(**message: Any) -> None:
        nonlocal last_put
        if "event" in message or "waiting" in message:
            last_put = mailbox.put.remote(number, message)
        else:
            messages.append(message)

    is_shared = Path(job["marker"]).exists()
    scratch = scratch_folder(job["study"], node)
    store = Store(job["out"] if is_shared else scratch / "results", job["data_dir"] or None, checkpoints=job["checkpoints"])
    runs: list[Run] = []
    try:
        runs = read_runs(job)
        with holding():
            _find_data(runs[0], job["data_dir"] or None, scratch)
            _check_sources(runs, job["made_from"], store)
            train_job(job | {"out": str(store.out)}, send)
    except Exception as error:
        messages.append(describe_failure(error))
    ray.wait([last_put], timeout=ARRIVE_SECONDS)  # Ray delivers messages in order: all have arrived before the answer
    failed = any("error" in message for message in messages)
    records = {} if is_shared or failed else {run.key: store.files_of(run) for run in runs}
    return {"node": node, "messages": messages, "records": records}


def measure_on_node(text: str) -> int:
    """Return how many of the runs of a job fit into the memory of this node as one fleet."""
    job, _ = _enter(text)
    options = TrainOptions(device=job["device"], data_dir=job["data_dir"], parents=job["parents"], budget=job["budget"])
    return largest_fleet(read_runs(job), options)


def clear_scratch(study: str, node: str) -> None:
    """Remove the scratch folder of a study, whose results have all been recorded elsewhere."""
    shutil.rmtree(scratch_folder(study, node), ignore_errors=True)


def scratch_folder(study: str, node: str) -> Path:
    """Return the folder of a study on a node. A study that is started again finds it by the same name."""
    return Path(tempfile.gettempdir(), f"selfless-{getpass.getuser()}", f"{study}-{node[:16]}")


def _enter(text: str) -> tuple[dict[str, Any], str]:
    """Return (the job, the name of this node); set the working directory and the threads, as the driver's machine has them."""
    import ray

    job: dict[str, Any] = json.loads(text)
    if Path(job["folder"]).is_dir():
        os.chdir(job["folder"])  # paths of data and modules may be relative
    if job["device"] == "cpu":
        torch.set_num_threads(1)
    return job, str(ray.get_runtime_context().get_node_id())


def _find_data(run: Run, data_dir: str | None, scratch: Path) -> None:
    """Find or fetch the data of a run. One process of a node does it; the others wait, and then find the data."""
    if run.parent:
        return  # its new tasks are files of the user
    name = hashlib.sha256(json.dumps([run.stream, run.stream_options, data_dir], sort_keys=True).encode()).hexdigest()[:16]
    found = scratch / f"data-{name}"
    if not found.exists():
        with locked(scratch / "data.lock", lambda: None):
            if not found.exists():
                build_streams([run], Path(data_dir) if data_dir else None)
                found.touch()


def _check_sources(runs: list[Run], expected: list[str], store: Store) -> None:
    """Raise DataError if a run would be made from other files here than on the machine that started the study."""
    for run, digest in zip(runs, expected, strict=True):
        if store.made_from(run) != digest:
            raise DataError(
                f"the data of {run.stream}, or the code of its network or method, differ from those of the machine that started the study"
            )
