"""What Ray adds: 64 small runs with the local engine and with Ray on this machine, one and two workers, in turns.

    python benchmarks/ray_overhead.py --rounds 5 --to results/bench/ray-overhead.json

Runs are "together" (64 learning rates: one fleet for each worker) or "alone" (64 seeds: each run is a fleet, so 64 jobs for Ray). In
each round both engines train the same runs, one after the other, in changing order, so that another load on the machine meets both. Ray is
started once, and a small study is trained first, which starts its workers; both are reported apart. What each study costs at its start
(the local engine starts worker processes, Ray a mailbox) is measured with a study of one run for each worker, and subtracted from both
in `ratio_without_start`: it compares the seconds of the other runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from kills import make_data

# Ray reads these when it is imported. With a token of our own, none is written into the home folder. Workers get a fair share of the cores.
OWN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=("together", "alone"), default=["alone", "together"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--to", type=Path, help="write the figures there as JSON")
    given = parser.parse_args()
    os.environ |= OWN
    import ray

    import selfless
    from selfless import Run
    from selfless.files import write_json

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="selfless-overhead-") as place:
        data, number = make_data(Path(place)), 0

        def seconds(engine: str, workers: int, count: int, kind: str = "alone") -> float:
            """Train `count` runs and return the seconds."""
            nonlocal number
            number += 1
            changes = [{"lr": 0.01 + 0.001 * i} if kind == "together" else {"seed": i} for i in range(count)]
            runs = [Run(stream=data, model="mlp-64", epochs=given.epochs, batch=10, **change) for change in changes]
            began = time.perf_counter()
            selfless.train(runs, out=Path(place, str(number)), engine=engine, workers=workers if engine == "local" else None, device="cpu")
            return time.perf_counter() - began

        for workers in given.workers:
            began = time.perf_counter()
            ray.init(address="local", num_cpus=workers, object_store_memory=80_000_000, include_dashboard=False, log_to_driver=False)
            up = time.perf_counter() - began
            first = seconds("ray", workers, 2 * workers)
            for kind in given.kinds:
                starts, times = ({engine: list[float]() for engine in ("local", "ray")} for _ in range(2))
                for turn in range(given.rounds):
                    for engine in ("local", "ray") if turn % 2 else ("ray", "local"):
                        starts[engine].append(seconds(engine, workers, workers))
                        times[engine].append(seconds(engine, workers, given.runs, kind))
                    print(workers, kind, {engine: round(found[-1], 1) for engine, found in times.items()}, flush=True)
                ratios = [b / a for a, b in zip(times["local"], times["ray"], strict=True)]
                rest = {engine: [a - b for a, b in zip(times[engine], starts[engine], strict=True)] for engine in times}
                net = [b / a for a, b in zip(rest["local"], rest["ray"], strict=True)]
                rows.append(
                    {
                        "workers": workers,
                        "kind": kind,
                        "ray_start_s": round(up, 2),
                        "first_study_s": round(first, 2),
                        **{f"{engine}_start_of_study_s": [round(one, 2) for one in found] for engine, found in starts.items()},
                        **{f"{engine}_s": [round(one, 2) for one in found] for engine, found in times.items()},
                        "ratio": _spread(ratios),
                        "ratio_without_start": _spread(net),
                    }
                )
            ray.shutdown()
    result = {"runs": given.runs, "epochs": given.epochs, "cores": os.cpu_count(), "load": list(os.getloadavg()), "rows": rows}
    print(result)
    if given.to:
        write_json(given.to, result)
    return 0


def _spread(ratios: list[float]) -> dict[str, float]:
    """Return the median, the least and the largest."""
    return {name: round(f(ratios), 3) for name, f in (("median", statistics.median), ("least", min), ("most", max))}


if __name__ == "__main__":
    sys.exit(main())
