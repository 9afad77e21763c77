"""Disturb studies on a Ray cluster at random moments, and check that every run ends exactly once, with the numbers of the local engine.

    python benchmarks/ray_faults.py --events 30 --seed 0 --to results/reliability/ray-faults.json

The cluster is on this machine: a head and two nodes of one core. An event kills a worker (SIGKILL), removes a node and adds another, or
kills the driver and starts it again; it happens only while a fleet trains. A study of small runs is started as often as the events need. At
its end: each run is recorded once, as done or as failed with a reason; a record that was once written has not changed since; what is done
has the numbers of an undisturbed local run, bit for bit; nothing else is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kills import NUMBERS, make_data

# Ray reads these when it is imported. With a token of our own, none is written into the home folder. Workers get a fair share of the cores.
OWN = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": uuid.uuid4().hex,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "SELFLESS_FAULTS": uuid.uuid4().hex,
}
SIZES: dict[str, Any] = {"object_store_memory": 80_000_000, "include_dashboard": False}
EVENTS = ("worker", "worker", "worker", "node", "driver")


def runs_of(data: str) -> list[Any]:
    """Return 12 runs: four fleets of three members."""
    from selfless import Run

    base: dict[str, Any] = {"stream": data, "model": "mlp-8", "epochs": 12, "batch": 10, "sparsify": "slnid:1e-2"}
    return [Run(**base, seed=seed, lr=lr) for seed in range(2) for lr in (0.01, 0.02, 0.03, 0.04, 0.05, 0.06)]


def drive(out: Path, address: str, data: str) -> None:
    """The driver: train the runs on the cluster."""
    import selfless

    selfless.train(runs_of(data), out=out, engine="ray", address=address)


def workers_of(mark: str) -> list[int]:
    """Return the processes of this cluster that train a fleet."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                folder.joinpath("cmdline").read_bytes().startswith(b"ray::train_on_node")
                and mark.encode() in (folder / "environ").read_bytes()
            ):
                found.append(int(folder.name))
    return found


class Trial:
    """One study, its driver, and the events that disturb it."""

    def __init__(self, out: Path, cluster: Any, data: str, rng: random.Random, kinds: Sequence[str]) -> None:
        self.out, self.cluster, self.data, self.rng, self.kinds = out, cluster, data, rng, kinds
        self.events = Counter[str]()
        self.seen: dict[str, bytes] = {}  # records, as they were when first seen
        self.start()

    def start(self) -> None:
        words = [sys.executable, __file__, "--drive", str(self.out), self.cluster.address, self.data]
        with open(self.out.with_name("said.txt"), "a", encoding="utf-8") as said:
            self.driver = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=said, env=os.environ | {"PYTHONWARNINGS": "always"})

    def disturb(self) -> None:
        """Do one event, if there is something to disturb."""
        what, processes = self.rng.choice(self.kinds), workers_of(OWN["SELFLESS_FAULTS"])
        if not processes:
            return
        if what == "worker":
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.rng.choice(processes), signal.SIGKILL)
                self.events[what] += 1
        elif what == "node":
            self.cluster.remove_node(self.rng.choice(sorted(self.cluster.worker_nodes, key=id)), allow_graceful=False)
            self.cluster.add_node(num_cpus=1, wait=False, **SIZES)
            self.events[what] += 1
        elif what == "driver" and self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()
            self.events[what] += 1
            self.start()

    def look(self) -> None:
        """Note the records that are there."""
        for path in self.out.glob("*/metrics.json"):
            self.seen.setdefault(path.parent.name, path.read_bytes())

    def problems(self, expected: dict[str, Any]) -> tuple[list[str], Counter[str], list[str]]:
        """Return (what is wrong, the number of runs by status, the reasons of failed runs)."""
        from selfless.runner.store import Store

        wrong, status, reasons = [], Counter[str](), list[str]()
        records = Store(self.out).keys()
        deaths = self.out.with_name("said.txt").read_text(encoding="utf-8").count("; it is tried once more")
        if deaths > self.events["worker"]:
            wrong.append(f"{deaths} workers counted as dead, but {self.events['worker']} were killed: a lost node counts as none")
        if sorted(records) != sorted(expected):
            wrong.append(f"{len(records)} records for {len(expected)} runs")
        for key, before in self.seen.items():
            if (self.out / key / "metrics.json").read_bytes() != before:
                wrong.append(f"run {key} was recorded again")
        for key in records:
            values = json.loads((self.out / key / "metrics.json").read_text())
            status[values["status"]] += 1
            if values["status"] == "failed":
                reasons.append(values["error"])
            elif {name: values.get(name) for name in NUMBERS} != expected.get(key):
                wrong.append(f"run {key} differs from the local engine")
        wrong += [f"{path.name} is left" for path in self.out.rglob("*") if path.name.startswith((".", "training-", "study-"))]
        wrong += ["a failed run gives no reason" for reason in reasons if not reason]
        return wrong, status, reasons


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no further study after so many seconds")
    parser.add_argument("--pause", type=float, default=3.0, help="mean seconds between two events")
    parser.add_argument("--kinds", nargs="+", choices=EVENTS, default=EVENTS, help="what happens, each of these equally often")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, help="write the counts there as JSON")
    parser.add_argument("--drive", nargs=3, metavar=("OUT", "ADDRESS", "DATA"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drive:
        drive(Path(given.drive[0]), given.drive[1], given.drive[2])
        return 0
    os.environ |= OWN
    from ray.cluster_utils import Cluster

    import selfless
    from selfless.files import write_json

    rng, started = random.Random(given.seed), time.monotonic()
    events, status, problems, reasons, trials = Counter[str](), Counter[str](), list[str](), Counter[str](), 0
    with tempfile.TemporaryDirectory(prefix="selfless-faults-") as place:
        data = make_data(Path(place))
        local = Path(place, "local")
        selfless.train(runs_of(data), out=local, workers=2)
        whole = {path.parent.name: json.loads(path.read_text()) for path in local.glob("*/metrics.json")}
        expected = {key: {name: values.get(name) for name in NUMBERS} for key, values in whole.items()}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SIZES})
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=1, **SIZES)
            while sum(events.values()) < given.events and time.monotonic() - started < given.seconds:
                trials += 1
                trial = Trial(Path(place, "out"), cluster, data, rng, given.kinds)
                while trial.driver.poll() is None:
                    time.sleep(rng.uniform(0.1, 2 * given.pause))
                    trial.look()
                    if sum(events.values()) + sum(trial.events.values()) < given.events:
                        trial.disturb()
                if trial.driver.returncode:
                    problems.append(f"study {trials}: the driver ended with status {trial.driver.returncode}")
                wrong, ended, why = trial.problems(expected)
                problems += [f"study {trials}: {one}" for one in wrong]
                events.update(trial.events)
                status.update(ended)
                reasons.update(re.sub(r" on (a )?node.* ended", " ended", reason) for reason in why)
                shutil.rmtree(trial.out)
                trial.out.with_name("said.txt").unlink()
                print(json.dumps({"study": trials, "events": dict(trial.events), "runs": dict(ended), "problems": wrong}), flush=True)
        finally:
            cluster.shutdown()
    result = {
        "seed": given.seed,
        "studies": trials,
        "events": dict(events),
        "runs": dict(status),
        "reasons": dict(reasons),
        "problems": problems,
    }
    print(json.dumps(result, indent=1))
    if given.to:
        write_json(given.to, result)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
