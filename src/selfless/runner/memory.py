"""How many runs fit into memory as one fleet, measured with one training step of one member and of two members."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from selfless.engine.build import CannotShareFleet
from selfless.engine.learner import Learner
from selfless.runner.continuing import find_parent
from selfless.runner.network_traits import network_traits
from selfless.runner.options import TrainOptions
from selfless.spec import Run

FEW = 8  # fleets up to this size are not measured; a fleet that does not fit is split in halves later
SPARE = 0.8  # the share of free memory that a fleet may use; importance passes and other programs need the rest

Make = Callable[[Sequence[Run]], Learner]


def parts_that_fit(group: Sequence[Run], options: TrainOptions, processes: int) -> Iterator[list[Run]]:
    """Split a group of runs that can train together into parts that fit into memory; `processes` share each part."""
    size = largest_fleet(group, options)
    if 1 < size < len(group):
        size = max(1, size // processes) * processes
    yield from (list(group[i : i + size]) for i in range(0, len(group), size))


def largest_fleet(group: Sequence[Run], options: TrainOptions) -> int:
    """Return how many of these runs, which can train together, this machine trains as one fleet; measured if they are many."""
    if options.device == "cpu" and network_traits(group[0]).convolves:
        return 1  # stacking convolutions costs a CPU more than it saves (docs/performance.md)

    def make(runs: Sequence[Run]) -> Learner:
        parent = find_parent(runs[0], options)
        return Learner(runs, device=options.device, data_dir=options.data_dir, budget=options.budget, parent=parent)

    return most(group, make, options.device)


def most(runs: Sequence[Run], make: Make, device: str) -> int:
    """Return how many of these runs fit into one fleet; all of them if free memory is unknown."""
    free = available(device)
    if len(runs) <= FEW or free is None:
        return len(runs)
    one = step_bytes(runs[:1], make, device)
    if one * len(runs) <= SPARE * free / 2:
        return len(runs)  # they fit even if members share no memory
    other = next((run for run in runs if run.seed != runs[0].seed), runs[1])
    try:
        two = step_bytes([runs[0], other], make, device)
    except CannotShareFleet:
        return 1
    each = max(two - one, 1)
    return max(1, min(len(runs), 1 + int((SPARE * free - one) // each)))


def step_bytes(runs: Sequence[Run], make: Make, device: str) -> int:
    """Return the peak memory of a training step of these runs in bytes, with their data."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        try:
            make(runs).rehearse()
        except torch.cuda.OutOfMemoryError:
            return available(device) or 1  # it needs more than all free memory
        return int(torch.cuda.max_memory_allocated(device) - before)
    with Count() as count:
        make(runs).rehearse()
    return int(count.peak)


class Count(TorchDispatchMode):
    """Count the bytes of all existing tensors: `now`, and at their `peak`.

    A storage counts from the operator that returns it until it is freed; views share a storage. Temporary memory inside an operator is not
    counted.
    """

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
                    weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return result

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def available(device: str) -> int | None:
    """Return the free memory of the device in bytes; None if unknown."""
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    found = [free for free in (_free_in_machine(), _free_in_container()) if free is not None]
    return min(found) if found else None


def _free_in_machine() -> int | None:
    """Return the free memory of the machine, as Linux reports it; None on other systems."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))) * 1024
    return None


def _free_in_container() -> int | None:
    """Return the free memory within the limit of a container (cgroup 2); None without a limit."""
    with contextlib.suppress(OSError, ValueError):  # "max", which is not a number, means no limit
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text(encoding="utf-8")) for name in ("memory.max", "memory.current"))
        return max(limit - used, 0)
    return None
