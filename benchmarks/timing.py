"""Time several functions in turn, so that whatever else the machine does falls on all of them; and count the memory they take."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


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


def interleaved(functions: Mapping[str, Callable[[], object]], repeats: int, warm: bool = True) -> Times:
    """Call each function once a round, in turn, `repeats` rounds."""
    if warm:
        for function in functions.values():
            function()
    rounds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            rounds[name].append(time.perf_counter() - start)
    return Times(rounds)


class _Count(TorchDispatchMode):
    """Every storage that an operator returns counts while it lives (views share theirs; scratch inside an operator is not seen)."""

    def __init__(self) -> None:
        super().__init__()
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


def peak_bytes(function: Callable[[], object]) -> int:
    """The most bytes of tensors that a call makes and holds at a time, what it keeps for later included."""
    with _Count() as count:
        function()
    return count.peak


def hardware() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "load": [round(x, 2) for x in os.getloadavg()],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain", "--", "../src") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
