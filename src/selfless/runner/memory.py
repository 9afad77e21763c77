"""How many runs fit into memory as one fleet: measured, by rehearsing a step with one member and with two."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from selfless.engine.build import CannotShareFleet
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
    try:
        two = _taken([runs[0], other], make, device)
    except CannotShareFleet:
        return 1
    each = max(two - one, 1)
    return max(1, min(len(runs), 1 + int((SPARE * free - one) // each)))


def _taken(runs: Sequence[Run], make: Callable[[Sequence[Run]], Learner], device: str) -> int:
    """Bytes that a step of these runs takes at its peak, data and all."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        try:
            make(runs).rehearse()
        except torch.cuda.OutOfMemoryError:
            return available(device) or 1  # all there is, and more
        return int(torch.cuda.max_memory_allocated(device) - before)
    with Count() as count:
        make(runs).rehearse()
    return int(count.peak)


class Count(TorchDispatchMode):
    """Every storage that an operator returns counts while it lives (views share theirs; scratch inside an operator is not seen)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs and storage._cdata not in self.known:
                    self.known.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def available(device: str) -> int | None:
    """Free bytes of the device, None where that cannot be known."""
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    found = [free for free in (_machine(), _container()) if free is not None]
    return min(found) if found else None


def _machine() -> int | None:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))) * 1024
    return None


def _container() -> int | None:
    """What a container's limit leaves (cgroup 2)."""
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text(encoding="utf-8")) for name in ("memory.max", "memory.current"))
        return max(limit - used, 0)
    return None
