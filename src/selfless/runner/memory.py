"""How many runs fit into memory as one fleet: measured, by rehearsing a step with one member and with two."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from pathlib import Path

from selfless.engine.learner import Learner
from selfless.spec import Run

FEW = 8  # fleets up to here are not measured: a machine that cannot hold them is told so by its own error, and they are halved
SPARE = 0.8  # the share of free memory that a fleet may plan on: importance passes and other programs need some


def most(runs: Sequence[Run], make: Callable[[Sequence[Run]], Learner], device: str) -> int:
    """The number of these runs that one fleet may hold; all of them where memory cannot be read."""
    free = available(device)
    if len(runs) <= FEW or free is None:
        return len(runs)
    one = _taken(runs[:1], make, device)
    if one * len(runs) <= SPARE * free / 2:
        return len(runs)  # even if nothing were shared
    other = next((run for run in runs if run.seed != runs[0].seed), runs[1])
    two = _taken([runs[0], other], make, device)
    each = max(two - one, 1)
    return max(1, min(len(runs), 1 + int((SPARE * free - one) // each)))


def _taken(runs: Sequence[Run], make: Callable[[Sequence[Run]], Learner], device: str) -> int:
    """Bytes that a step of these runs takes at its peak, data and all (on a CPU: what it has left behind afterwards)."""
    import torch

    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        try:
            make(runs).rehearse()
        except torch.cuda.OutOfMemoryError:
            return available(device) or 1  # all there is, and more
        return torch.cuda.max_memory_allocated(device) - before
    before = _resident()
    learner = make(runs)
    learner.rehearse()
    return max(_resident() - before, 0)


def available(device: str) -> int | None:
    """Free bytes of the device, None where that cannot be known."""
    import torch

    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))) * 1024
    return None


def _resident() -> int:
    """Bytes of this process that are in memory."""
    import os

    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
