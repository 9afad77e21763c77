"""What Ray adds: 64 small runs with the local engine and with Ray on this machine, one and two workers, in turns.

    python benchmarks/ray_overhead.py --rounds 3 --to results/bench/ray-overhead.json

In each round both engines train the same runs, one after the other, in changing order, so that another load on the machine meets both. Ray
is started once, and a small study is trained first, which starts its workers; both are reported apart. The local engine starts its worker
processes in each study, so its start is measured with a study of one run for each worker, and subtracted in `without_start`.
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
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
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

        def seconds(engine: str, workers: int, count: int) -> float:
            """Train `count` runs of different seeds, which are fleets of one, and return the seconds."""
            nonlocal number
            number += 1
            runs = [Run(stream=data, model="mlp-8", epochs=given.epochs, batch=10, seed=seed) for seed in range(count)]
            began = time.perf_counter()
            selfless.train(runs, out=Path(place, str(number)), engine=engine, workers=workers, device="cpu")
            return time.perf_counter() - began

        for workers in given.workers:
            began = time.perf_counter()
            ray.init(address="local", num_cpus=workers, object_store_memory=80_000_000, include_dashboard=False, log_to_driver=False)
            up = time.perf_counter() - began
            first = seconds("ray", workers, workers)
            starts, times = [], {"local": list[float](), "ray": list[float]()}
            for turn in range(given.rounds):
                starts.append(seconds("local", workers, workers + 1) if workers > 1 else 0.0)
                for engine in ("local", "ray") if turn % 2 else ("ray", "local"):
                    times[engine].append(seconds(engine, workers, given.runs))
                print(workers, {engine: round(found[-1], 1) for engine, found in times.items()}, flush=True)
            ray.shutdown()
            ratios = [b / a for a, b in zip(times["local"], times["ray"], strict=True)]
            net = [b / (a - s) for a, b, s in zip(times["local"], times["ray"], starts, strict=True)]
            rows.append(
                {
                    "workers": workers,
                    "ray_start_s": round(up, 2),
                    "first_study_s": round(first, 2),
                    "local_start_s": round(statistics.median(starts), 2),
                    **{f"{engine}_s": [round(one, 2) for one in found] for engine, found in times.items()},
                    "ratio": round(statistics.median(ratios), 3),
                    "ratio_without_start": round(statistics.median(net), 3),
                }
            )
    result = {"runs": given.runs, "epochs": given.epochs, "cores": os.cpu_count(), "load": list(os.getloadavg()), "rows": rows}
    print(result)
    if given.to:
        write_json(given.to, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
