"""Run the checks of DDP and FSDP2 with the NCCL backend on one GPU, and compare with one process.

    python benchmarks/nccl_world.py --to results/reliability/nccl.json

NCCL takes one process for each GPU, so on one GPU its world has the size 1. Every sum, gather and broadcast of a keeper goes through NCCL
all the same, with tensors on the GPU. A second world has two processes on that GPU, which talk by gloo: there ranks have different samples.
The checks are those of tests/distributed/checks.py: two tasks on all ranks equal two tasks in one process, to float tolerance.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from selfless.files import write_json

ROOT = Path(__file__).parents[1]
WORLDS: dict[str, tuple[str, ...]] = {  # name → flags of the checks
    "nccl, 1 process": ("--device", "cuda", "--backend", "nccl", "--sizes", "1"),
    "gloo on the GPU, 2 processes, DDP": ("ddp", "--device", "cuda", "--backend", "gloo", "--sizes", "2"),
}
REHEARSAL: dict[str, tuple[str, ...]] = {"gloo on the CPU, 1 process": ("--device", "cpu", "--backend", "gloo", "--sizes", "1")}


def run_world(flags: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Run the checks in one world; return {"passed": […], "failed": {check: the end of its error}}."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.json")
        words = [sys.executable, "-W", "ignore", "-m", "tests.distributed.checks", str(path), *flags]
        try:
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return {"passed": [], "failed": {"all": f"the checks did not end within {seconds:.0f} seconds"}}
        if not path.exists():
            return {"passed": [], "failed": {"all": done.stderr[-2000:]}}
        results: dict[str, str | None] = json.loads(path.read_text(encoding="utf-8"))
    passed = [name for name, error in results.items() if error is None]
    return {"passed": passed, "failed": {name: error[-2000:] for name, error in results.items() if error is not None}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="the most for one world")
    parser.add_argument("--rehearse", action="store_true", help="a world of one process on the CPU, with gloo")
    parser.add_argument("--to", type=Path, help="write the results there as JSON")
    given = parser.parse_args()
    if not given.rehearse and not torch.cuda.is_available():
        print("no GPU is available; --rehearse runs the same checks on the CPU")
        return 1
    worlds = {name: run_world(flags, given.seconds) for name, flags in (REHEARSAL if given.rehearse else WORLDS).items()}
    for name, found in worlds.items():
        print(f"{name}: {len(found['passed'])} passed, {len(found['failed'])} failed")
        for check, error in found["failed"].items():
            print(f"--- {check}\n{error}")
    gpu = "none" if given.rehearse else torch.cuda.get_device_name()
    if given.to:
        write_json(given.to, {"torch": torch.__version__, "gpu": gpu, "worlds": worlds})
    return 1 if any(found["failed"] for found in worlds.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
