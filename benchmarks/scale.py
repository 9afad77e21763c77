"""Where the bottleneck of a large study is: unit costs measured here, and a simulation of the schedule on many GPUs.

    python benchmarks/scale.py --to results/bench/scale.json --plot results/bench/scale.png

Measured on this machine: recording a result (with its checkpoint), the driver's own time for a run (its job, the answer, looking it up),
loading a small stream, and starting a worker. The seconds of training are an assumption, `--train`, because they depend on the study.
The schedule is that of the Ray engine: fleets from `plan.spread`, one for each free GPU, in order.
Three things are shared and serve one request at a time:

    driver     one process: a job to send and an answer to take for each fleet, and its time for each of the runs
    storage    one file system: a record for each run
    data       one file system or one download for each node, when its first fleet starts; then each fleet reads its local copy
"""

from __future__ import annotations

import argparse
import heapq
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kills import make_data


@dataclass(frozen=True)
class Costs:
    """Seconds of one unit."""

    record: float  # the storage: one result and its checkpoint
    driver: float  # the driver: one run
    load: float  # a node: reading the data of a fleet from its own disk
    fetch: float  # the shared storage: the data of one node
    train: float  # one fleet of any size up to `fleet` (an assumption)
    start: float  # importing the package in a new worker


def measure(train: float, gigabytes: float, bandwidth: float) -> Costs:
    """Measure the unit costs of this machine; `gigabytes` of data travel to a node at `bandwidth` GB a second."""
    import selfless
    from selfless import Run
    from selfless.engine.build import build_streams
    from selfless.runner.store import Store

    def seconds(what: Callable[[], object], times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            what()
        return (time.perf_counter() - began) / times

    with tempfile.TemporaryDirectory(prefix="selfless-scale-") as place:
        run = Run(stream=make_data(Path(place)), model="mlp-128", epochs=1)
        selfless.train(run, out=Path(place, "a"), workers=1)
        here, there = Store(Path(place, "a")), Store(Path(place, "b"))
        files = here.files_of(run)

        def drive() -> None:
            text = json.dumps({"runs": [run.as_dict()], "made_from": [here.made_from(run)]})
            Run.from_dict(json.loads(text)["runs"][0])
            here.load(run)

        return Costs(
            record=seconds(lambda: there.adopt(run, files, again=True), 50),
            driver=seconds(drive, 50),
            load=seconds(lambda: build_streams([run], None), 5),
            fetch=gigabytes / bandwidth,
            train=train,
            start=seconds(lambda: subprocess.run([sys.executable, "-c", "import selfless.runner.node"], check=True), 2),
        )


def simulate(runs: int, gpus: int, per_node: int, fleet: int, costs: Costs) -> dict[str, Any]:
    """Return the seconds of the study and how busy each part was. GPU g is on node g // per_node."""
    from selfless import Run
    from selfless.runner.plan import spread

    group = [Run(seed=0)] * runs  # equal values: only their number matters here
    parts = [len(part) for part in spread([group], [fleet], gpus, by_share=True)]
    free = [(0.0, g) for g in range(gpus)]
    heapq.heapify(free)
    driver = storage = 0.0  # when each is free again
    busy = {"driver": 0.0, "storage": 0.0, "gpu": 0.0}
    ready: dict[int, float] = {}  # node → when its data are there
    ended: list[tuple[float, int]] = []

    def take(kind: str, now: float, since: float, cost: float) -> float:
        """Return when a request that comes `now` to something that is free `since` is served."""
        busy[kind] += cost
        return max(now, since) + cost

    for size in parts:
        now, gpu = heapq.heappop(free)
        driver = take("driver", now, driver, costs.driver)
        begun = driver + (costs.start if now == 0.0 else 0.0)
        node = gpu // per_node
        if node not in ready:
            storage = take("storage", begun, storage, costs.fetch)
            ready[node] = storage
        done = max(begun, ready[node]) + costs.load + costs.train
        busy["gpu"] += costs.train
        ended.append((done, size))
        heapq.heappush(free, (done + size * costs.record, gpu))
    last = 0.0
    storage = max(ready.values())
    for done, size in sorted(ended):
        storage = take("storage", done, storage, size * costs.record)
        last = take("driver", storage, last, size * costs.driver)
    shares = {"driver": busy["driver"] / last, "storage": busy["storage"] / last, "gpu": busy["gpu"] / (gpus * last)}
    ideal = costs.train * len(parts) / gpus
    return {
        "runs": runs,
        "gpus": gpus,
        "fleets": len(parts),
        "seconds": round(last, 1),
        "ideal": round(ideal, 1),
        "busy": {k: round(v, 4) for k, v in shares.items()},
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the share of time in which GPUs train, by the number of GPUs, a line for each number of runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    for runs in sorted({row["runs"] for row in rows}):
        mine = [row for row in rows if row["runs"] == runs]
        axes.plot([row["gpus"] for row in mine], [100 * row["busy"]["gpu"] for row in mine], marker="o", label=f"{runs:,} runs")
    axes.set(xscale="log", xlabel="GPUs", ylabel="GPU time spent in training, %", ylim=(0, 100))
    axes.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=float, default=600.0, help="seconds in which a GPU trains one fleet (an assumption)")
    parser.add_argument("--fleet", type=int, default=16, help="the largest fleet (an assumption)")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="data of a node (an assumption)")
    parser.add_argument("--bandwidth", type=float, default=1.0, help="GB a second from the shared storage (an assumption)")
    parser.add_argument("--to", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    costs = measure(given.train, given.gigabytes, given.bandwidth)
    gpus = (8, 16, 32, 64, 128, 256, 512, 1000)
    rows = [simulate(runs, count, 8, given.fleet, costs) for runs in (2000, 10_000) for count in gpus]
    study = next(row for row in rows if (row["runs"], row["gpus"]) == (2000, 64))
    result = {"costs": asdict(costs), "fleet": given.fleet, "study": study, "curve": rows}
    print(json.dumps(result, indent=1))
    if given.to:
        given.to.parent.mkdir(parents=True, exist_ok=True)
        given.to.write_text(json.dumps(result, indent=1) + "\n")
    if given.plot:
        draw(rows, given.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
