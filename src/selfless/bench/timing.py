"""Time several functions in turn, so that whatever else the machine does falls on all of them; and count the memory they take."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from selfless.runner.memory import Count

T = TypeVar("T")


@dataclass(frozen=True)
class Times:
    """Seconds of every function in every round."""

    rounds: dict[str, list[float]]

    def best(self, name: str) -> float:
        return min(self.rounds[name])

    def ratio(self, name: str, base: str) -> float:
        """Least time against least time: the repetition that was disturbed least, of each."""
        return self.best(name) / self.best(base)

    def paired(self, name: str, base: str) -> float:
        """The median over rounds of the ratio within a round: agrees with `ratio` unless the machine was busy."""
        return statistics.median(a / b for a, b in zip(self.rounds[name], self.rounds[base], strict=True))


def interleaved(functions: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> Times:
    """Call each function once to warm up, then once a round, in turn."""
    for function in functions.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            seconds[name].append(clocked(function, device))
    return Times(seconds)


def clocked(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, what it left to do on the device included."""
    synchronise(device)
    begun = time.perf_counter()
    function()
    synchronise(device)
    return time.perf_counter() - begun


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ----------------------------------------------------------------------------------------------------------------------- memory
def peak(function: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """(what the call gives, the most bytes of tensors it made and held at a time, what it keeps for later included)."""
    gc.collect()
    if device.type != "cuda":
        with Count() as count:
            made = function()
        return made, count.peak
    torch.cuda.empty_cache()
    synchronise(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    made = function()
    synchronise(device)
    return made, torch.cuda.max_memory_allocated(device) - before


def free_bytes(device: torch.device) -> int:
    """What the device (the machine, for a CPU) has left."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError):  # not Linux
        return 4 * 2**30


# -------------------------------------------------------------------------------------------------------------------- where it was
def hardware(device: torch.device) -> dict[str, Any]:
    """What the figures were made with."""
    from selfless.runner.machine import machine

    known = machine()
    return {
        "device": str(device),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
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
    """ " with changes" where the code is not the commit's: only git can tell, and not where SELFLESS_COMMIT names the commit."""
    if os.environ.get("SELFLESS_COMMIT"):
        return ""
    here = Path(__file__).resolve().parents[1]
    try:
        done = subprocess.run(["git", "status", "--porcelain", "--", "."], cwd=here, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " with changes" if done.returncode == 0 and done.stdout.strip() else ""
