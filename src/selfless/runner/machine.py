"""The machine that trains: its device, its threads, and its description in a result."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from selfless.runner.network_traits import network_traits
from selfless.spec import Run


def resolve_device(device: str) -> str:
    """Return the device for a name: "auto" is a GPU if there is one, else the CPU."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", device):
        raise ValueError(f"device {device!r} is not known; choose auto, cpu, cuda, or cuda:1 for the second GPU")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} is not available: this machine has no usable GPU; use --device cpu")
    if ":" in device and int(device[5:]) >= torch.cuda.device_count():
        raise ValueError(f"device {device!r} is not available: this machine has {torch.cuda.device_count()} GPU, counted from cuda:0")
    return device


def core_count() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def suitable_threads(run: Run, device: str) -> Iterator[None]:
    """Inside `with`: one thread for a small MLP on a CPU, whose steps are too short to be split between threads."""
    before = torch.get_num_threads()
    if device == "cpu" and network_traits(run).has_short_steps:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def machine() -> dict[str, Any]:
    """Return the hardware, threads, versions and commit that a result is computed with."""
    from selfless import __version__

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "hardware": gpu or _cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "selfless": __version__,
        "commit": _commit(),
    }


def _cpu() -> str:
    """Return the name of the CPU and the number of its cores."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _commit() -> str:
    """Return the git commit of this package; "" if unknown."""
    if os.environ.get("SELFLESS_COMMIT"):  # for a copy of the code without its history
        return os.environ["SELFLESS_COMMIT"]
    try:
        here = Path(__file__).resolve().parent
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=here, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
