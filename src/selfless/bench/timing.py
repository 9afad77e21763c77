"""Time several functions in turn, so that a disturbance of the machine falls on all of them; measure the memory of a call."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from selfless.runner.memory import Count

T = TypeVar("T")


@dataclass(frozen=True)
class Times:
    """Seconds of every function in every round."""

    rounds: dict[str, list[float]]

    def best(self, name: str) -> float:
        """min_r t_r: the round that was disturbed least."""
        return min(self.rounds[name])

    def ratio(self, name: str, base: str) -> float:
        """min_r t_r / min_r b_r."""
        return self.best(name) / self.best(base)

    def median_ratio(self, name: str, base: str) -> float:
        """median_r (t_r / b_r). It agrees with `ratio` unless the machine was busy."""
        return statistics.median(a / b for a, b in zip(self.rounds[name], self.rounds[base], strict=True))


def time_in_turn(functions: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> Times:
    """Call each function once to warm up, then once per round, one after another."""
    for function in functions.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            seconds[name].append(time_call(function, device))
    return Times(seconds)


def time_call(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, with the work that it leaves on the device."""
    clock = time.process_time if uses_processor_time(device) else time.perf_counter
    synchronise(device)
    start = clock()
    function()
    synchronise(device)
    return clock() - start


def uses_processor_time(device: torch.device) -> bool:
    """Return True on a CPU with one thread: processor time does not count the waiting for other programs on a busy machine."""
    return device.type == "cpu" and torch.get_num_threads() == 1


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ----------------------------------------------------------------------------------------------------------------------- memory
def measure_memory(function: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """Return (result of the call, the most bytes of new tensors held at a time); tensors that outlive the call count too."""
    gc.collect()
    if device.type != "cuda":
        with Count() as count:
            result = function()
        return result, count.peak
    torch.cuda.empty_cache()
    synchronise(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = function()
    synchronise(device)
    return result, torch.cuda.max_memory_allocated(device) - before


def free_bytes(device: torch.device) -> int:
    """Return the free memory of the device; for a CPU, that of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError):  # not Linux
        return 4 * 2**30
