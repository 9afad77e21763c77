"""The folder of results: `<out>/<key>/` holds spec.json, metrics.json, checkpoint.safetensors and log.jsonl of one run.

Each file is written under a temporary name and renamed, so it is whole or absent. While a fleet trains, `training-<fleet>.safetensors` in
the folder of its first member holds its state, and `lock` keeps other processes from training the same run.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfless.data import checksum
from selfless.data import objects_digest as contents
from selfless.files import locked, write_atomically, write_json
from selfless.spec import Result, Run
from selfless.terms import NotHere


def made_from(run: Run, data_dir: Path | str | None = None) -> str:
    """A digest of what a run depends on and its settings only name: one's own arrays, folders, network, methods and weights, and the object
    sets, which come whole, in part or in copies. Empty for other published data, and where those sets are not here to compare."""
    digest = hashlib.sha256()
    kind, _, path = run.stream.removeprefix("joint-").partition(":")
    files: list[Path] = []
    if kind == "arrays":
        files = [Path(path)]
    elif kind == "folders":
        for item in sorted(Path(path).rglob("*")):
            if item.is_file():
                digest.update(f"{item.relative_to(path)} {item.stat().st_size} {item.stat().st_mtime_ns}\n".encode())
    elif kind == "objects":
        options = {name: value for name, value in run.stream_options.items() if name in ("boxes", "aircraft")}
        shown = contents(run.stream.removeprefix("joint-"), data_dir, tasks=run.tasks, **options)
        if not shown:
            return ""
        digest.update(shown.encode())
    weights = Path(str(run.model_options.get("weights", "")))
    if weights.is_file():  # a path; a name with its digest says enough
        digest.update(checksum(weights).encode())
    module, _, _ = run.model.partition(":")
    if ":" in run.model:
        files += [f for f in (Path(module.replace(".", "/") + ".py"), Path(module.replace(".", "/")) / "__init__.py") if f.is_file()]
    own = [type(term) for term in (run.preserve, run.sparsify) if term.is_custom()]
    files += [Path(inspect.getfile(kind)) for kind in own if kind.__module__ != "__main__"]
    for file in files:
        with contextlib.suppress(OSError), open(file, "rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16] if files or kind in ("folders", "objects") or weights.is_file() else ""


class Store:
    """Results by key. `data_dir`: where the data that they were made from is looked for; `checkpoints`: whether tensors are kept too."""

    def __init__(self, out: Path | str, data_dir: Path | str | None = None, *, checkpoints: bool = True) -> None:
        self.out, self.data_dir, self.checkpoints = Path(out), data_dir or None, checkpoints
        self._objects: dict[str, str] = {}

    def folder(self, run: Run) -> Path:
        return self.out / run.key

    def load(self, run: Run) -> Result | None:
        """The recorded result of a run, or None; also None where one's own data or network, or an object set, has changed since."""
        result = self._read(self.folder(run) / "metrics.json")
        if result is None:
            return None
        now = self.made_from(run)
        unknown = not now and run.stream.removeprefix("joint-").startswith("objects")  # the sets are not here: nothing to compare
        return result if unknown or result.about.get("made_from", "") == now else None

    def made_from(self, run: Run) -> str:
        """`made_from` with this store's data; object sets, whose files take a moment to look through, are looked at once."""
        if not run.stream.removeprefix("joint-").startswith("objects"):
            return made_from(run, self.data_dir)
        at = json.dumps([run.stream, run.tasks, run.model, run.stream_options, run.model_options], sort_keys=True)
        if at not in self._objects:
            self._objects[at] = made_from(run, self.data_dir)
        return self._objects[at]

    def clear(self, run: Run) -> None:
        """Forget what is recorded of a run. Hold its lock. The file of a fleet that was stopped stays: it is the others' too."""
        for path in self.folder(run).glob("[!.]*"):
            if path.name != "lock" and not path.name.startswith("training-"):
                path.unlink()

    def sweep(self) -> None:
        """Remove the files of stopped fleets all of whose members have been recorded since."""
        for path, keys in self.unfinished():
            if all((self.out / key / "metrics.json").exists() for key in keys):
                path.unlink(missing_ok=True)

    def unfinished(self) -> list[tuple[Path, list[str]]]:
        """The fleets that were stopped while they trained: (their file, the keys of their members)."""
        from safetensors import SafetensorError, safe_open

        found = []
        for path in sorted(self.out.glob("*/training-*.safetensors")):
            with contextlib.suppress(SafetensorError, OSError, KeyError, ValueError), safe_open(path, framework="pt") as file:
                found.append((path, json.loads(file.metadata()["keys"])))
        return found

    def all(self) -> list[Result]:
        """Every recorded result, in the order they were recorded; not those of `choosing/`, which strengths were chosen by."""
        paths = [path for path in self.out.rglob("metrics.json") if "choosing" not in path.relative_to(self.out).parts]
        found = [(path.stat().st_mtime_ns, path) for path in paths]
        return [result for _, path in sorted(found) if (result := self._read(path)) is not None]

    def _read(self, path: Path) -> Result | None:
        try:
            return Result.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except NotHere as error:
            raise ValueError(f"{path} is of a method of one's own, {error}; run this where that module is") from error
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a result of this version ({error}); delete its folder, or train again with selfless run --force"
            ) from error

    def record(self, result: Result, tensors: Callable[[], Mapping[str, Any]]) -> None:
        """Write a result: the spec and the tensors first, the metrics, which make it count as done, last."""
        from safetensors.torch import save_file

        folder = self.folder(result.run)
        write_json(folder / "spec.json", result.run.as_dict())
        if self.checkpoints:
            write_atomically(folder / "checkpoint.safetensors", lambda path: save_file(dict(tensors()), path, {"key": result.run.key}))
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
        """Hold the runs, in a fixed order so that two processes never wait for each other. One that was refused leaves no folder."""
        with contextlib.ExitStack() as stack:
            for run in sorted(runs, key=lambda r: r.key):
                stack.enter_context(locked(self.folder(run) / "lock", lambda run=run: busy(run)))  # type: ignore[misc]
                stack.callback(_tidy, self.folder(run))  # while the lock is still held
            yield


def _tidy(folder: Path) -> None:
    """Remove a folder that holds nothing but its lock. Hold that lock; who waits for it makes both anew (files.locked)."""
    with contextlib.suppress(OSError):
        if [path.name for path in folder.iterdir()] == ["lock"]:
            (folder / "lock").unlink()
            folder.rmdir()
