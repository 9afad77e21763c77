"""Train fleets on the nodes of a Ray cluster (`engine="ray"`). Ray decides where and when; this file hands it jobs and takes the answers.

A job is a Ray task that needs one GPU, or one core on a CPU. Only JSON goes to a node. What can go wrong, and what follows:

    a worker dies                     as on one machine (`selfless.runner.jobs`): once more, then halves, then failed
    a node is lost                    its jobs start again elsewhere; that counts as no death, at most LOSSES times for a job
    a node lacks the data of a run    jobs with that stream go to other nodes
    the disk of a node is full        all jobs go to other nodes
    no node is left for a job         its runs are recorded as failed, with the reason
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import signal
import socket
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from selfless.data import name_stream
from selfless.files import marked
from selfless.network.given import PREFIX, network_title
from selfless.runner.jobs import shared_fields, train_jobs
from selfless.runner.machine import core_count
from selfless.runner.memory import FEW
from selfless.runner.options import TrainOptions
from selfless.runner.plan import fleets, spread
from selfless.runner.store import Store
from selfless.spec import Result, Run
from selfless.workers.mailbox import Mailbox

PAUSE = 0.2  # seconds between two looks at the messages
STOP_SECONDS = 10.0  # how long a fleet may take to stop before its worker is killed
LOSSES = 8  # how many nodes a job may lose before that counts as a death
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def train_on_cluster(stopped: list[list[Run]], rest: list[Run], store: Store, options: TrainOptions) -> dict[Run, Result]:
    """Train the interrupted fleets `stopped` and the runs `rest`, in fleets of a size that suits the nodes; return the failures."""
    _check_travel([run for runs in [*stopped, rest] for run in runs])
    with marked(store.out) as marker, Cluster(store, options, marker) as cluster:
        options = dataclasses.replace(options, device=cluster.device)
        return train_jobs([*stopped, *cluster.divide(rest, options)], cluster, store, options)


def _check_travel(runs: Sequence[Run]) -> None:
    """Raise ValueError for streams and networks that were passed as objects: only names travel to other machines."""
    for run in runs:
        what = network_title(run.model) if run.model.startswith(PREFIX) else None
        what = run.stream if name_stream(run.stream.removeprefix("joint-"))[1] is not None else what
        if what is not None:
            raise ValueError(
                f"{what} was passed as an object, which other machines cannot read; put the data into a file that all of them see "
                "(stream='arrays:/shared/tasks.npz') and the network into a module (model='mynet:build'), or use engine='local'"
            )


class Cluster:
    """The nodes of a Ray cluster, which do jobs as `selfless.workers.Pool` does. A context manager, which connects and disconnects.

    device   what a fleet trains on: "cuda" or "cpu"
    slots    how many fleets train at once
    """

    def __init__(self, store: Store, options: TrainOptions, marker: Path) -> None:
        self.store, self.options, self.marker = store, options, marker
        name = f"{socket.gethostname()}:{store.out.resolve()}"
        self.study = hashlib.sha256(name.encode()).hexdigest()[:16]
        self.full: dict[str, str] = {}  # node → why it can record nothing
        self.without: dict[tuple[str, str], str] = {}  # (node, stream) → why its data cannot be read there
        self.places: dict[int, str] = {}  # job → the node where it runs
        self.losses = Counter[int]()
        self.used = set[str]()  # the nodes that trained for this study
        self.tasks: dict[Callable[..., Any], Any] = {}  # functions as Ray tasks
        self.asked: Any = None  # the answer of the mailbox that is on its way

    def __enter__(self) -> Cluster:
        try:
            import ray
        except ImportError as error:
            raise RuntimeError("Ray is not installed; write: pip install 'selfless-learning[ray]'") from error
        self.ray: Any = ray
        self.is_own = not ray.is_initialized()
        if self.is_own:
            _connect(ray, self.options.address)
        found = ray.cluster_resources()
        self.device = _choose_device(self.options.device, int(found.get("GPU", 0)))
        kind = "GPU" if self.device == "cuda" else "CPU"
        self.slots = max(1, min(int(found.get(kind, 0)), self.options.workers or 10**9))
        self.per_node = 1 if kind == "GPU" else max([1, *(int(node["Resources"].get("CPU", 0)) for node in self._nodes())])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._clear_scratch()
        if self.is_own:
            self.ray.shutdown()

    # -------------------------------------------------------------------------------------------------------- planning
    def divide(self, runs: Sequence[Run], options: TrainOptions) -> list[list[Run]]:
        """Return the fleets of these runs: as large as the memory of a node allows, spread over all GPUs or cores."""
        groups = fleets(runs)
        sizes = [max(1, size // self.per_node) for size in self._measure(groups, options)]
        return spread(groups, sizes, self.slots, by_share=self.device == "cuda")

    def _measure(self, groups: Sequence[list[Run]], options: TrainOptions) -> list[int]:
        """Return how many runs of each group fit into one node, measured on nodes where there are many."""
        from selfless.runner.node import measure_on_node

        task = self._task(measure_on_node)
        about = shared_fields([run for group in groups for run in group], self.store, options) | {"folder": os.getcwd()}
        asked = {
            i: task.remote(json.dumps(about | {"runs": [run.as_dict() for run in group]}))
            for i, group in enumerate(groups)
            if len(group) > FEW
        }
        sizes = [len(group) for group in groups]
        for i, ref in asked.items():
            with contextlib.suppress(self.ray.exceptions.RayError):  # a fleet that does not fit is halved when it trains
                sizes[i] = self.ray.get(ref)
        return [size * (self.per_node if len(group) <= FEW else 1) for size, group in zip(sizes, groups, strict=True)]

    def _task(self, function: Callable[..., Any], **options: Any) -> Any:
        """Return a Ray task that needs what one fleet needs. Ray does not repeat it: `run` decides."""
        if function not in self.tasks:  # once: Ray sends each new one to all workers
            self.tasks[function] = self.ray.remote(function)
        resources = {"num_cpus": 1, "num_gpus": 1 if self.device == "cuda" else 0}
        return self.tasks[function].options(**(resources | {"max_retries": 0} | options))

    # ------------------------------------------------------------------------------------------------------------ jobs
    def run(
        self,
        jobs: Sequence[Mapping[str, Any]],
        receive: Callable[[int, dict[str, Any]], None],
        replace: Callable[[int, int | str], bool],
    ) -> None:
        """Do all jobs; see `selfless.runner.jobs.Workers`. On any exception (Ctrl-C, too) all fleets are stopped first."""
        ray, running = self.ray, dict[Any, int]()
        waiting, most = list(range(len(jobs))), self.options.workers or len(jobs)
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        mailbox = ray.remote(Mailbox).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()
        self.places, self.losses, self.asked = {}, Counter(), None
        try:
            while waiting or running:
                for ref, number in self._without_node(running, jobs):
                    ray.cancel(ref, force=True)
                    del running[ref]
                    waiting.insert(0, number)
                while waiting and len(running) < most:
                    number = waiting.pop(0)
                    if reason := self._refusal(jobs[number]):
                        receive(number, {"failed": reason})
                    else:
                        running[self._submit(jobs[number], number, mailbox)] = number
                done = self._wait(list(running))
                messages = self._take(mailbox, PAUSE)
                if done:  # what their workers sent is in the mailbox now, but was perhaps not when it was asked
                    messages += self._take(mailbox, STOP_SECONDS) + self._take(mailbox, STOP_SECONDS)
                for number, message in messages:
                    if "node" in message:
                        self.places[number] = message["node"]
                        self.used.add(message["node"])
                    elif number in running.values():
                        receive(number, message)
                for ref in done:
                    number = running.pop(ref)
                    if self._has_to_repeat(ref, number, jobs[number], receive, replace):
                        waiting.insert(0, number)
        finally:
            self._stop(list(running))
            ray.kill(mailbox)

    def _submit(self, job: Mapping[str, Any], number: int, mailbox: Any) -> Any:
        """Give a job to Ray; return the reference of its answer."""
        from selfless.runner.node import train_on_node

        runs = [Run.from_dict(values) for values in job["runs"]]
        more = {
            "study": self.study,
            "marker": str(self.marker.resolve()),
            "folder": os.getcwd(),
            "made_from": [self.store.made_from(run) for run in runs],
        }
        self.places.pop(number, None)
        avoided = self._avoided(job)
        options = {"label_selector": {"ray.io/node-id": f"!in({','.join(avoided)})"}} if avoided else {}
        return self._task(train_on_node, **options).remote(json.dumps({**job, **more}), number, mailbox)

    def _wait(self, refs: list[Any]) -> list[Any]:
        """Return the jobs that have ended, after at most PAUSE seconds."""
        if not refs:
            return []
        done, _ = self.ray.wait(refs, timeout=PAUSE)
        return list(self.ray.wait(refs, num_returns=len(refs), timeout=0)[0]) if done else []

    def _take(self, mailbox: Any, seconds: float) -> list[tuple[int, dict[str, Any]]]:
        """Return the messages that the mailbox had when it was asked. They are progress only: a mailbox that Ray restarts may lose some."""
        if self.asked is None:
            self.asked = mailbox.take.remote()
        try:
            messages = list(self.ray.get(self.asked, timeout=seconds))
        except self.ray.exceptions.GetTimeoutError:
            return []  # it is asked for the same answer later, so that no message is lost
        except self.ray.exceptions.RayError:
            messages = []
        self.asked = None
        return messages

    def _has_to_repeat(
        self,
        ref: Any,
        number: int,
        job: Mapping[str, Any],
        receive: Callable[[int, dict[str, Any]], None],
        replace: Callable[[int, int | str], bool],
    ) -> bool:
        """Take the answer of a job that has ended; return True if it has to be done again."""
        try:
            answer = self.ray.get(ref)
        except self.ray.exceptions.RayError as error:
            return self._lost(number, error, replace)
        problem = next((message for message in answer["messages"] if "error" in message), None)
        for message in answer["messages"]:
            if message is not problem:
                receive(number, message)
        if problem is None:
            receive(number, {"records": answer["records"]} if answer["records"] else {})
            return False
        node, name = answer["node"], self._address_of(answer["node"])
        if problem["errno"] in FULL:
            self.full[node] = f"node {name}: {problem['error']}"
            warnings.warn(f"node {name} is left out: {problem['error']}", stacklevel=8)
            return True
        if problem["is_data_error"]:
            stream = job["runs"][0]["stream"]
            self.without[node, stream] = f"node {name}: {problem['error']}"
            warnings.warn(f"node {name} is left out for {stream}: {problem['error']}", stacklevel=8)
            return True
        return replace(number, problem["error"])

    def _lost(self, number: int, error: Exception, replace: Callable[[int, int | str], bool]) -> bool:
        """Return True if a job that ended without an answer is to be done again."""
        errors, place = self.ray.exceptions, f"node {self._address_of(self.places[number])}" if number in self.places else "a node"
        if isinstance(error, errors.NodeDiedError | errors.ObjectLostError | errors.LocalRayletDiedError):
            self.losses[number] += 1
            if self.losses[number] <= LOSSES:
                warnings.warn(f"{place} was lost; its fleets start again elsewhere", stacklevel=9)
                return True
        if isinstance(error, errors.OutOfMemoryError):
            return replace(number, f"Ray stopped its worker because {place} ran out of memory")
        if isinstance(error, errors.RayTaskError):
            return replace(number, str(error).strip().splitlines()[-1])
        return replace(number, f"its worker on {place} ended ({type(error).__name__})")

    # ----------------------------------------------------------------------------------------------------------- nodes
    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self.ray.nodes() if node["Alive"]]

    def _address_of(self, node: str) -> str:
        """Return the address of a node, and the start of its name, because several nodes may share a machine."""
        found = next((one["NodeManagerAddress"] for one in self.ray.nodes() if one["NodeID"] == node), "unknown")
        return f"{found} ({node[:8]})"

    def _avoided(self, job: Mapping[str, Any]) -> list[str]:
        """Return the nodes that cannot do a job."""
        stream = job["runs"][0]["stream"]
        return sorted({*self.full, *(node for node, lacks in self.without if lacks == stream)})

    def _refusal(self, job: Mapping[str, Any]) -> str:
        """Return why no node can do a job; "" if one can, or may come."""
        if not (avoided := self._avoided(job)):
            return ""
        kind = "GPU" if self.device == "cuda" else "CPU"
        able = [node["NodeID"] for node in self._nodes() if node["Resources"].get(kind, 0) >= 1]
        reasons = [*self.full.values(), *(why for (_, stream), why in self.without.items() if stream == job["runs"][0]["stream"])]
        return "" if set(able) - set(avoided) else f"no node can train it: {reasons[-1]}"

    def _without_node(self, running: Mapping[Any, int], jobs: Sequence[Mapping[str, Any]]) -> list[tuple[Any, int]]:
        """Return the jobs that have not begun and that no node can do any more."""
        if not self.full and not self.without:
            return []
        return [(ref, number) for ref, number in running.items() if number not in self.places and self._refusal(jobs[number])]

    def _stop(self, refs: list[Any]) -> None:
        """Interrupt fleets, so that they release their locks; kill those that do not stop."""
        if not refs:
            return
        for ref in refs:
            self.ray.cancel(ref, force=False)
        _, left = self.ray.wait(refs, num_returns=len(refs), timeout=STOP_SECONDS)
        for ref in left:
            self.ray.cancel(ref, force=True)

    def _clear_scratch(self) -> None:
        """Remove the scratch folders of the nodes that trained. A node that does not answer keeps its own."""
        from selfless.runner.node import clear_scratch

        pin = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        names = [node["NodeID"] for node in self._nodes() if node["NodeID"] in self.used]
        options = [{"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": pin(name, soft=False)} for name in names]
        refs = [self._task(clear_scratch, **one).remote(self.study, name) for one, name in zip(options, names, strict=True)]
        self.ray.wait(refs, num_returns=len(refs), timeout=STOP_SECONDS)


def _connect(ray: Any, address: str | None) -> None:
    """Connect to a cluster, or start Ray on this machine if none is named. Ray's handler of SIGTERM does not replace the program's."""
    import logging

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    before = signal.getsignal(signal.SIGTERM)
    named = address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"address": named} if named else {"address": "local", "num_cpus": core_count(), "include_dashboard": False}
    try:
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RuntimeError(f"no Ray cluster answers at {named or 'this machine'}: {error}; start one: ray start --head") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _choose_device(wanted: str, gpus: int) -> str:
    """Return "cuda" or "cpu" for the cluster."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {wanted!r} cannot be chosen on a cluster, where Ray assigns GPUs; write --device cuda, cpu or auto")
    if wanted == "cuda" and not gpus:
        raise ValueError("device 'cuda' is not available: no node of the cluster has a GPU; use --device cpu")
    return "cuda" if gpus and wanted != "cpu" else "cpu"
