"""How quickly an object set is prepared: `selfless data prepare NAME` into a cache that is empty, again and again.

    python benchmarks/prepare.py flowers --data-dir ~/data --out results/bench/prepare-cpu

NAME's files lie in objects/NAME below the data folder (docs/data.md). A round is the whole call: checking the files, reading the lists,
every image to 224×224, and the array on disk; `fitting_seconds` is the part that `selfless data prepare` itself tells. The cache of a round
is a folder of its own in the system's temporary one (TMPDIR), removed afterwards; the user's is not touched. OUT/bench.json has all rounds,
each with the load of the machine before it, the CPU time of the workers (on quiet cores nearly workers × seconds), the share of the cores'
time that a virtual machine's host gave to others (`stolen`), and, for JPEGs that are not packed, what decoding by Pillow alone costs just
then: the ratio of the two says more than images a second where others are at work.
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

from selfless.bench.rows import aim, row
from selfless.bench.timing import hardware
from selfless.data import OBJECTS, DataError, prepare_objects
from selfless.files import write_text


def prepared(name: str, data_dir: Path | None, workers: int) -> dict[str, Any]:
    """One round, into an empty cache."""
    load, decoding, stolen = [round(x, 2) for x in os.getloadavg()], decoded(name, data_dir), _stolen_seconds()
    with tempfile.TemporaryDirectory(prefix="selfless-prepare-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        cpu, begun = _cpu_seconds(), time.perf_counter()
        made = prepare_objects(name, data_dir=data_dir, workers=workers)
        seconds = time.perf_counter() - begun
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


def decoded(name: str, data_dir: Path | None, count: int = 300) -> float | None:
    """CPU seconds that Pillow takes to decode one of `count` images of the set."""
    root = Path(data_dir or os.environ.get("SELFLESS_DATA", ".")) / "objects" / name
    found = [path.read_bytes() for path in itertools.islice(root.rglob("*.jpg"), count)]
    begun = time.process_time()
    for data in found:
        Image.open(io.BytesIO(data)).convert("RGB")
    return (time.process_time() - begun) / len(found) if found else None


def _stolen_seconds() -> float:
    """What the host of a virtual machine gave to others, summed over cores; 0 where that is not told."""
    try:
        return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def _cpu_seconds() -> float:
    """Of this process and of the workers that have ended."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(OBJECTS)}")
    parser.add_argument("--data-dir", type=Path, help="where data lies (default: $SELFLESS_DATA)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for bench.json")
    options = parser.parse_args()
    if options.workers < 1 or options.repeats < 1:
        parser.error("--workers and --repeats must be at least 1")
    found: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "hardware": hardware(torch.device("cpu"))}
    try:
        rounds = [prepared(options.name, options.data_dir, options.workers) for _ in range(options.repeats)]
    except (DataError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")
    best = min(rounds, key=lambda one: float(one["seconds"]))
    rate = best["images_per_second"]
    what = f"{OBJECTS[options.name].title}, {best['images']:,} images prepared by {options.workers} workers"
    told = ", ".join(f"{one['images_per_second']:.0f}" for one in rounds)
    ratio = f"; {best['times_decoding']:.2f}× the CPU time of decoding alone" if best["times_decoding"] else ""
    found["prepare"] = [
        row(
            what,
            best["seconds"],
            rate=f"{rate:.0f} images/s",
            says=f"the best of {len(rounds)}: {told} images/s{ratio}; {100 * best['stolen']:.0f} % of the cores' time taken by the host",
            target=aim(rate, "≥", 300, " images/s"),
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
