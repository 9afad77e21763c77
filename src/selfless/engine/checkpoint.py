"""The checkpoint of a fleet: its whole state in one file, written during training and read to continue it."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from selfless.engine.fleet import Fleet
from selfless.engine.progress import Progress
from selfless.files import write_tensors

WRITTEN = 1e9  # assumed bytes per second of saving, until it has been measured
SAVING, LONGEST = 0.05, 600.0  # the share of the time that saving may take; seconds after which the state is saved in any case


class CannotContinue(Exception):
    """The checkpoint could not be used and has been removed."""


class Checkpoint:
    """The file `path`; None: nothing is saved.

    `stamp` identifies the data and networks of the fleet. A file with another stamp is not continued.
    """

    def __init__(self, path: Path | None, stamp: str, fleet: Fleet) -> None:
        self.path, self.stamp, self.device = path, stamp, fleet.device
        self._saved_at = time.perf_counter()
        self._seconds = sum(t.nbytes for t in fleet.tensors().values()) / WRITTEN  # how long saving takes

    def save(self, fleet: Fleet, progress: Progress, best: dict[str, Tensor]) -> None:
        """Write the state, unless it was written a moment ago (`SAVING`)."""
        now = time.perf_counter()
        if self.path is None or now - self._saved_at < min(self._seconds / SAVING, LONGEST):
            return
        tensors = fleet.tensors() | {f"best.{n}": t for n, t in best.items()}
        plain = {n: t.cpu().contiguous() for n, t in tensors.items()}
        meta = {"progress": progress.text(), "tasks": str(fleet.tasks), "threads": str(torch.get_num_threads())}
        meta |= {"keys": json.dumps([run.key for run in fleet.runs]), "stamp": self.stamp}
        meta["sha256"] = _digest(plain, meta)
        write_tensors(self.path, plain, meta)
        self._saved_at = time.perf_counter()
        self._seconds = self._saved_at - now

    def resume(self, fleet: Fleet) -> tuple[Progress, dict[str, Tensor]] | None:
        """Restore the fleet; return its progress and the tensors of the best epochs so far. Return None if there is no file.

        A file that cannot be used is removed with a warning. Then CannotContinue is raised, and the fleet may be partly restored.
        """
        if self.path is None or not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                meta = file.metadata()
            if meta.get("stamp", "") != self.stamp:
                raise ValueError("its data, network or method has changed since it was written")
            stored = load_file(self.path)
            if meta.pop("sha256", "") not in ("", _digest(stored, meta)):  # states of before have no checksum
                raise ValueError("its content does not have its checksum: it has been changed or damaged")
            tensors = {name: tensor.to(self.device) for name, tensor in stored.items()}
            progress = Progress.parse(meta["progress"])
            fleet.restore(tensors, int(meta["tasks"]))
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise  # the file is sound
            warnings.warn(f"{self.path} cannot be continued ({error}); training starts again", stacklevel=2)
            self.path.unlink()
            raise CannotContinue from error
        if self.device.type == "cpu":
            torch.set_num_threads(int(meta.get("threads", torch.get_num_threads())))  # the same bits need the same order of sums
        return progress, {n.removeprefix("best."): t for n, t in tensors.items() if n.startswith("best.")}


def is_out_of_memory(error: Exception) -> bool:
    """Return True if the device, or the machine, has no memory left."""
    return isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _digest(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> str:
    """Return the SHA-256 of the metadata and of all tensors, which are contiguous, in the order of their names."""
    total = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())  # one entry may have any stride
        total.update(flat.view(torch.uint8).numpy().data)
    return total.hexdigest()
