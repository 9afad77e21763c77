"""The machine and the versions of a benchmark."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from selfless.bench.timing import uses_processor_time


def describe_hardware(device: torch.device) -> dict[str, Any]:
    """Return the description of the machine in bench.json: hardware, threads, load, versions, commit, time."""
    from selfless.runner.machine import machine

    known = machine()
    return {
        "device": str(device),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": "processor time" if uses_processor_time(device) else "wall",
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "load": [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "selfless": known["selfless"],
        "commit": known["commit"] + _changes(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _changes() -> str:
    """Return " with changes" if git reports changed files in the package. SELFLESS_COMMIT, which names the commit, skips the question."""
    if os.environ.get("SELFLESS_COMMIT"):
        return ""
    package = Path(__file__).resolve().parents[1]
    try:
        done = subprocess.run(["git", "status", "--porcelain", "--", "."], cwd=package, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " with changes" if done.returncode == 0 and done.stdout.strip() else ""
