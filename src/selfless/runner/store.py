"""The folder of results: `<out>/<key>/` holds spec.json, metrics.json, checkpoint.safetensors and log.jsonl of one run.

Results can also be packed into one file, `<out>/runs.jsonl.xz` (`Store.pack`); the folder of a run overrides the archive. Each file is
written under a temporary name and renamed, so it is complete or absent. While a fleet trains, `training-<fleet>.safetensors` in the folder
of its first member contains its state, and `lock` keeps other processes from training the same run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from selfless.data import checksum
from selfless.data.digests import Contents
from selfless.files import locked, naming, remove_left_over, write_bytes, write_json, write_tensors, write_text
from selfless.inputs import NotHere, check_seal, seal
from selfless.runner.archive import NAME, damaged, read_archive, write_archive
from selfless.runner.sources import contents_of, is_made_from, made_from
from selfless.spec import Result, Run

__all__ = ["Store", "made_from"]

METRICS, TENSORS, LOG = "metrics.json", "checkpoint.safetensors", "log.jsonl"
FILES = ("spec.json", LOG, TENSORS, METRICS)  # of a finished run, in the order of writing: a run with metrics counts as done
PACKED = {METRICS, "spec.json", LOG, "lock"}  # a folder with only these files can be removed after packing: it has no tensors


class Store:
    """Results by key.

    data_dir      folder with the data that runs depend on
    checkpoints   True if `record` also writes tensors
    """

    def __init__(self, out: Path | str, data_dir: Path | str | None = None, *, checkpoints: bool = True) -> None:
        self.out, self.data_dir, self.checkpoints = Path(out), data_dir or None, checkpoints
        self._contents: dict[str, Contents] = {}
        self._cleared: set[str] = set()  # archived results that are to be trained again

    def folder(self, run: Run) -> Path:
        """Return the folder of a run, which need not exist."""
        return self.out / run.key

    # ------------------------------------------------------------------------------------------------------------ reading
    def load(self, run: Run) -> Result | None:
        """Return the recorded result of a run; None if there is none, or if its custom data, network or method has changed."""
        result = self.get(run.key)
        return result if result is None or self.is_made_from(run, result.about.get("made_from", "")) else None

    def get(self, key: str) -> Result | None:
        """Return the recorded result of a key, from its folder or else from the archive; None if there is none."""
        result = _read(self.out / key / METRICS)
        if result is None and key not in self._cleared:
            line = read_archive(self.archive).get(key)
            result = None if line is None else _parse_archived(line, key, self.archive)
        return result

    def all(self, *, skip: bool = False) -> list[Result]:
        """Return every recorded result in order of recording, archives first. Runs in `choosing/` (for choosing strengths) are left out.

        If `out` is the folder of a run that was packed and removed, return its result from the archive in the parent folder.

        skip   leave out, with a warning, runs of custom methods that are not found or have changed, if there are others
        """
        parent = self.out.parent / NAME
        if not (self.out / METRICS).is_file() and (line := read_archive(parent).get(self.out.name)) is not None:
            return [_parse_archived(line, self.out.name, parent)]
        found, gone = list[Result](), list[MethodGone]()
        for read in self._readers():
            try:
                result = read()
            except MethodGone as error:
                if not skip:
                    raise
                gone.append(error)
            else:
                found += [] if result is None else [result]
        if gone and not found:
            raise gone[0]
        if gone:
            warnings.warn(f"{len(gone)} of {len(found) + len(gone)} runs are left out: {gone[0]}", stacklevel=2)
        return found

    def _readers(self) -> Iterator[Callable[[], Result | None]]:
        """Yield a function for each result that reads it, archives first. A folder overrides the archive beside it."""
        for path in sorted(self._find(NAME)):
            for key, line in read_archive(path).items():
                if not (path.parent / key / METRICS).is_file():
                    yield partial(_parse_archived, line, key, path)
        for _, path in sorted((path.stat().st_mtime_ns, path) for path in self._find(METRICS)):
            yield partial(_read, path)

    def _find(self, name: str) -> Iterator[Path]:
        return (path for path in self.out.rglob(name) if "choosing" not in path.relative_to(self.out).parts)

    def has(self, key: str) -> bool:
        """Return True if a result of that key is recorded."""
        return (self.out / key / METRICS).is_file() or (key not in self._cleared and key in read_archive(self.archive))

    def keys(self) -> list[str]:
        """Return the keys of the runs directly below `out` in order of recording, archived ones first. No result is read."""
        folders = sorted((path.stat().st_mtime_ns, path.parent.name) for path in self.out.glob(f"*/{METRICS}"))
        return list(dict.fromkeys([*read_archive(self.archive), *(name for _, name in folders)]))

    # ------------------------------------------------------------------------------------------------------------ archive
    @property
    def archive(self) -> Path:
        """The file that `pack` writes."""
        return self.out / NAME

    def pack(self, *, remove: bool = False) -> Path:
        """Add all results directly below `out` to the archive; return its path.

        remove   delete the packed folders, except those with tensors (a checkpoint, the state of an interrupted fleet)
        """
        found = {key: json.loads(line) for key, line in read_archive(self.archive).items()}
        folders = sorted((path.stat().st_mtime_ns, path) for path in self.out.glob(f"*/{METRICS}"))
        texts = {path.parent: path.read_text(encoding="utf-8") for _, path in folders}
        for folder, text in texts.items():
            result = _parse(text, folder / METRICS)
            if result.run.key != folder.name:
                raise ValueError(f"{folder / METRICS} holds run {result.run.key}, not {folder.name}; move it to the folder of its key")
            found.pop(folder.name, None)  # a run that was recorded again moves to the end
            found[folder.name] = json.loads(text)
        if not found:
            raise ValueError(f"{self.out} holds no results to pack; train something first: selfless run --out {self.out}")
        write_archive(self.archive, found.values())
        for folder, text in texts.items() if remove else ():
            _remove_packed(folder, text)
        return self.archive

    def extract(self, key: str, to: Path | str) -> Path:
        """Write spec.json and metrics.json of a key into `<to>/<key>/`, as they were recorded; return that folder."""
        file = self.out / key / METRICS
        text = file.read_text(encoding="utf-8") if file.is_file() else read_archive(self.archive).get(key)
        if text is None:
            raise ValueError(f"{self.out} has no run {key!r}. Its keys: selfless capacity {self.out} --json")
        values = json.loads(text)
        write_json(Path(to) / key / "spec.json", values["run"])
        write_json(Path(to) / key / METRICS, values)
        return Path(to) / key

    # ------------------------------------------------------------------------------------------------------------ sources
    def is_made_from(self, run: Run, digest: str) -> bool:
        """Return whether a run depends on the files of this digest; True if its data is not on this machine: then that is unknown."""
        contents = self._contents_of(run)
        return not contents.is_here or is_made_from(run, digest, self.data_dir, contents)

    def made_from(self, run: Run) -> str:
        """Return the digest of the files that a run depends on, with the data of this store."""
        return made_from(run, self.data_dir, self._contents_of(run))

    def _contents_of(self, run: Run) -> Contents:
        """Return the contents of a run's stream; cache contents that are slow to read."""
        key = json.dumps([run.stream, run.tasks, run.stream_options], sort_keys=True)
        if key in self._contents:
            return self._contents[key]
        found = contents_of(run, self.data_dir)
        if found.is_slow:
            self._contents[key] = found
        return found

    # ------------------------------------------------------------------------------------------------------------ writing
    def record(self, result: Result, tensors: Callable[[], Mapping[str, Any]]) -> Result:
        """Write a result; return it as it is read again. The metrics are written last, as a run with metrics counts as done."""
        folder = self.folder(result.run)
        write_json(folder / "spec.json", result.run.as_dict())
        if self.checkpoints:
            write_tensors(folder / TENSORS, tensors(), {"key": result.run.key})
            result = dataclasses.replace(result, weights=folder / TENSORS, about=result.about | {"checkpoint": checksum(folder / TENSORS)})
        write_json(folder / METRICS, seal(result.as_dict()))
        return result

    def files_of(self, run: Run) -> dict[str, bytes]:
        """Return the files of a recorded run by name, as they are, for `adopt` on another machine; the metrics are the last."""
        return {name: (self.folder(run) / name).read_bytes() for name in FILES if (self.folder(run) / name).is_file()}

    def adopt(self, run: Run, files: Mapping[str, bytes], *, again: bool = False) -> bool:
        """Record the files of a run that another machine trained; return False if it was recorded before, and is not trained `again`."""
        with self.lock([run], lambda run: None):
            if METRICS not in files or (not again and self.load(run) is not None):
                return False
            self.clear(run)
            for name in FILES:
                if name in files:
                    write_bytes(self.folder(run) / name, files[name])
        return True

    def log(self, run: Run, line: Mapping[str, Any]) -> None:
        """Append one line to a run's log.jsonl."""
        folder = self.folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        with naming(folder / LOG), open(folder / LOG, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def restore_log(self, run: Run, expected: Sequence[Mapping[str, Any]]) -> None:
        """Make the log of a run that continues what it was at its checkpoint: no line after it, and none missing before it.

        expected   the lines up to the checkpoint. A process that was killed may have written more, or not the last one, or half of it.
        """
        written: dict[Any, Mapping[str, Any]] = {}
        with contextlib.suppress(OSError):
            for line in (self.folder(run) / LOG).read_bytes().splitlines():
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    values = json.loads(line)
                    written[values["task"], values["epoch"], values["evaluated"]] = values
        lines = [written.get((line["task"], line["epoch"], line["evaluated"]), line) for line in expected]
        write_text(self.folder(run) / LOG, "".join(json.dumps(line) + "\n" for line in lines))

    def clear(self, run: Run) -> None:
        """Delete the record of a run. The caller must have locked it. The state of an interrupted fleet stays for its other members.

        An archive is not rewritten. This store ignores the archived result, and the next record, a folder, overrides it.
        """
        self._cleared.add(run.key)
        for path in self.folder(run).glob("[!.]*"):
            if path.name != "lock" and not path.name.startswith("training-"):
                path.unlink()

    # ------------------------------------------------------------------------------------------------------------ fleets
    def training(self, runs: Sequence[Run]) -> Path:
        """Return the file for the state of a fleet during training."""
        name = hashlib.sha256("".join(r.key for r in runs).encode()).hexdigest()[:16]
        return self.folder(runs[0]) / f"training-{name}.safetensors"

    def unfinished(self) -> list[tuple[Path, list[str]]]:
        """Return (file, keys of the members) of each fleet whose training was interrupted."""
        from safetensors import SafetensorError, safe_open

        found = []
        for path in sorted(self.out.glob("*/training-*.safetensors")):
            with contextlib.suppress(SafetensorError, OSError, KeyError, ValueError), safe_open(path, framework="pt") as file:
                found.append((path, json.loads(file.metadata()["keys"])))
        return found

    def sweep(self) -> None:
        """Remove the state of interrupted fleets whose members have all been recorded since."""
        for path, keys in self.unfinished():
            if all(self.has(key) for key in keys):
                path.unlink(missing_ok=True)
                path.with_suffix(".json").unlink(missing_ok=True)  # the note of a fleet that was killed

    def tidy(self, runs: Sequence[Run]) -> None:
        """Remove what killed processes left in the folders of these runs: temporary files, and states and notes of finished fleets.

        A folder that another process has locked is left alone.
        """
        remove_left_over(self.out)
        for folder in {self.folder(run) for run in runs}:
            if folder.is_dir() and any(path.name.startswith((".", "training-")) for path in folder.iterdir()):
                with contextlib.suppress(_Busy), locked(folder / "lock", _give_up):
                    remove_left_over(folder)
                    for note in folder.glob("training-*.json"):
                        note.unlink(missing_ok=True)
        self.sweep()

    @contextlib.contextmanager
    def lock(self, runs: Sequence[Run], busy: Callable[[Run], None]) -> Iterator[None]:
        """Lock the runs, in a fixed order so that two processes never wait for each other. Empty folders are removed at the end.

        busy   called with a run that another process has locked, before waiting for it
        """
        with contextlib.ExitStack() as stack:
            for run in sorted(runs, key=lambda r: r.key):
                stack.enter_context(locked(self.folder(run) / "lock", lambda run=run: busy(run)))  # type: ignore[misc]
                stack.callback(_remove_empty, self.folder(run))  # runs before the lock is released
            yield


class MethodGone(ValueError):
    """A run was made by a custom method that is not found here, or that has changed since."""


class _Busy(Exception):
    """Another process holds a lock."""


def _give_up() -> None:
    raise _Busy


def _read(path: Path) -> Result | None:
    """Return the result in a metrics.json, with the file of its weights; None if there is no such file."""
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    result = _parse(text, path)
    weights = path.parent / TENSORS
    return dataclasses.replace(result, weights=weights) if weights.is_file() else result


def _parse(text: str | bytes, path: Path) -> Result:
    """Return the result in a metrics.json; `path` is named in errors."""
    values: dict[str, Any] = {}
    try:
        values = json.loads(text)
        check_seal(values)
        return Result.from_dict(values)
    except NotHere as error:
        raise MethodGone(f"{path} was made by a custom method, {error}; run this in the folder of that module") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if own := _own_method(values):
            raise MethodGone(
                f"{path} was made by {own} as it was then ({error}); undo the change in that module, or move the folder of this run away"
            ) from error
        raise ValueError(
            f"{path} is not a result of this version ({error}); delete its folder, or train again with selfless run --force"
        ) from error


def _own_method(values: Any) -> str:
    """Return `module:Class` of a method of the user's in a record, "" if it has none; the record may have any form."""
    run = values.get("run") if isinstance(values, dict) else None
    terms = [run.get(field) for field in ("preserve", "sparsify")] if isinstance(run, dict) else []
    names = [str(term.get("name", "")) for term in terms if isinstance(term, dict)]
    return next((name for name in names if ":" in name), "")


def _parse_archived(line: str, key: str, path: Path) -> Result:
    """Return the result in a line of an archive; raise ValueError if it does not have this key."""
    values: dict[str, Any] = {}
    try:
        values = json.loads(line)
        result = Result.from_dict(values)
    except NotHere as error:
        raise MethodGone(f"run {key} in {path} was made by a custom method, {error}; run this in the folder of that module") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if own := _own_method(values):
            raise MethodGone(f"run {key} in {path} was made by {own} as it was then ({error}); undo the change in that module") from error
        raise damaged(path, f"run {key}: {error}") from error
    if result.run.key != key:
        raise damaged(path, f"run {key} has the settings of run {result.run.key}")
    return result


def _remove_packed(folder: Path, text: str) -> None:
    """Delete a folder whose result is in the archive, unless it has tensors or was recorded again in the meantime."""
    if {path.name for path in folder.iterdir()} - PACKED:
        return
    with locked(folder / "lock", lambda: None):
        if (folder / METRICS).read_text(encoding="utf-8") == text:
            for name in PACKED - {"lock"}:
                (folder / name).unlink(missing_ok=True)
        _remove_empty(folder)


def _remove_empty(folder: Path) -> None:
    """Remove a folder that contains only its lock file. The caller has the lock; a waiting process creates both again (files.locked)."""
    with contextlib.suppress(OSError):
        if [path.name for path in folder.iterdir()] == ["lock"]:
            (folder / "lock").unlink()
            folder.rmdir()
