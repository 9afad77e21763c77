"""The folder of results: `<out>/<key>/` holds spec.json, metrics.json, checkpoint.safetensors and log.jsonl of one run.

Each file is written under a temporary name and renamed, so it is whole or absent. While a fleet trains, `training-<fleet>.safetensors` in
the folder of its first member holds its state, and `lock` keeps other processes from training the same run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfless.files import locked, write_atomically, write_json
from selfless.spec import Result, Run


class Store:
    """Results by key."""

    def __init__(self, out: Path | str) -> None:
        self.out = Path(out)

    def folder(self, run: Run) -> Path:
        return self.out / run.key

    def load(self, run: Run) -> Result | None:
        """The recorded result of a run, or None."""
        return self._read(self.folder(run) / "metrics.json")

    def all(self) -> list[Result]:
        """Every recorded result, in the order they were recorded."""
        found = [(path.stat().st_mtime_ns, path) for path in self.out.glob("*/metrics.json")]
        return [result for _, path in sorted(found) if (result := self._read(path)) is not None]

    def _read(self, path: Path) -> Result | None:
        try:
            return Result.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a result of this version ({error}); delete it or pass --force to train again") from error

    def record(self, result: Result, tensors: Mapping[str, Any]) -> None:
        """Write a result: the spec and the tensors first, the metrics, which make it count as done, last."""
        from safetensors.torch import save_file

        folder = self.folder(result.run)
        write_json(folder / "spec.json", result.run.as_dict())
        write_atomically(folder / "checkpoint.safetensors", lambda path: save_file(dict(tensors), path, {"key": result.run.key}))
        write_json(folder / "metrics.json", result.as_dict())

    def log(self, run: Run, line: Mapping[str, Any]) -> None:
        folder = self.folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def training(self, runs: Sequence[Run]) -> Path:
        """The file a fleet keeps its state in while it trains."""
        name = hashlib.sha256("".join(r.key for r in runs).encode()).hexdigest()[:16]
        return self.folder(runs[0]) / f"training-{name}.safetensors"

    @contextlib.contextmanager
    def lock(self, runs: Sequence[Run], busy: Callable[[Run], None]) -> Iterator[None]:
        """Hold the runs, in a fixed order so that two processes never wait for each other."""
        with contextlib.ExitStack() as stack:
            for run in sorted(runs, key=lambda r: r.key):
                stack.enter_context(locked(self.folder(run) / "lock", lambda run=run: busy(run)))  # type: ignore[misc]
            yield
