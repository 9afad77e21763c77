"""Time how quickly an object set is prepared: `selfless data prepare NAME` with an empty cache, several times.

    python benchmarks/prepare.py flowers --data-dir ~/data --out results/bench/prepare-cpu

The files of NAME are in objects/NAME below the data folder (docs/data.md). One round is the whole call: check the files, read the lists,
fit every image to 224×224, write the array. Each round uses a new cache in the system's temporary folder (TMPDIR) and removes it; the
user's cache is not touched. OUT/bench.json holds all rounds. For each round:

- `fitting_seconds`: the time that `selfless data prepare` itself reports
- `load`: the load of the machine before the round
- `cpu_seconds`: CPU time of the workers, on a quiet machine nearly workers × seconds
- `stolen`: share of the cores' time that the host of a virtual machine gave to others
- `times_decoding`: CPU time over that of decoding the same JPEGs with Pillow, measured just before (not for packed images). On a busy
  machine this ratio says more than images per second.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from selfless.bench.hardware import describe_hardware
from selfless.bench.table import make_row, make_target
from selfless.data import OBJECTS, DataError, prepare_objects
from selfless.files import write_text


def time_round(name: str, data_dir: Path | None, workers: int) -> dict[str, Any]:
    """Prepare the set once, into an empty cache, and return the times."""
    load, decoding, stolen = [round(x, 2) for x in os.getloadavg()], time_decoding(name, data_dir), _stolen_seconds()
    with tempfile.TemporaryDirectory(prefix="selfless-prepare-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        cpu, start = _cpu_seconds(), time.perf_counter()
        made = prepare_objects(name, data_dir=data_dir, workers=workers)
        seconds = time.perf_counter() - start
        images, fitting = made.fresh
        cpu = _cpu_seconds() - cpu
        return {
            "images": images,
            "seconds": seconds,
            "images_per_second": images / seconds,
            "fitting_seconds": fitting,
            "cpu_seconds": cpu,
            "stolen": (_stolen_seconds() - stolen) / seconds / (os.cpu_count() or 1),
            "decoding_seconds_an_image": decoding,
            "times_decoding": cpu / images / decoding if decoding else None,
            "load": load,
            "train": made.about["train"],
            "test": made.about["test"],
            "split": made.about["split"],
        }


def time_decoding(name: str, data_dir: Path | None, count: int = 300) -> float | None:
    """Return the CPU seconds that Pillow takes to decode one image, as a mean over `count` images; None without JPEG files."""
    root = Path(data_dir or os.environ.get("SELFLESS_DATA", ".")) / "objects" / name
    found = [path.read_bytes() for path in itertools.islice(root.rglob("*.jpg"), count)]
    start = time.process_time()
    for data in found:
        Image.open(io.BytesIO(data)).convert("RGB")
    return (time.process_time() - start) / len(found) if found else None


def _stolen_seconds() -> float:
    """Return the time that the host of a virtual machine gave to others, summed over cores; 0 if unknown."""
    try:
        return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its workers that have ended."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(OBJECTS)}")
    parser.add_argument("--data-dir", type=Path, help="folder of the data (default: $SELFLESS_DATA)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for bench.json")
    options = parser.parse_args()
    if options.workers < 1 or options.repeats < 1:
        parser.error("--workers and --repeats must be at least 1")
    found: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "hardware": describe_hardware(torch.device("cpu"))}
    try:
        rounds = [time_round(options.name, options.data_dir, options.workers) for _ in range(options.repeats)]
    except (DataError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")
    best = min(rounds, key=lambda one: float(one["seconds"]))
    rate = best["images_per_second"]
    what = f"{OBJECTS[options.name].title}, {best['images']:,} images prepared by {options.workers} workers"
    rates = ", ".join(f"{one['images_per_second']:.0f}" for one in rounds)
    ratio = f"; {best['times_decoding']:.2f}× the CPU time of decoding alone" if best["times_decoding"] else ""
    found["prepare"] = [
        make_row(
            what,
            best["seconds"],
            rate=f"{rate:.0f} images/s",
            says=f"the best of {len(rounds)}: {rates} images/s{ratio}; {100 * best['stolen']:.0f} % of the cores' time taken by the host",
            target=make_target(rate, "≥", 300, " images/s"),
            images=best["images"],
            workers=options.workers,
            rounds=rounds,
        )
    ]
    if options.out is not None:
        write_text(options.out / "bench.json", json.dumps(found, indent=1) + "\n")
    print(f"{what}: {best['seconds']:.1f} s, {rate:.0f} images/s, {found['prepare'][0]['says']}")


if __name__ == "__main__":
    main()
