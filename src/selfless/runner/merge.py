"""Join folders of results: the parts of one study, trained on different machines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfless.runner.archive import NAME, write_archive
from selfless.runner.store import TENSORS, Store

CHOOSING = "choosing"  # the folder, in a folder of results, of the runs that chose strengths


@dataclass(frozen=True)
class Merged:
    """What `merge_results` did.

    path       the archive of the reported runs
    runs       how many runs were written, those that chose strengths included; each key once
    repeated   how many of them were in several folders
    conflicts  "KEY: A, B" for each of these whose numbers differ: the key, the folder that is kept, and the other one
    """

    path: Path
    runs: int
    repeated: int
    conflicts: tuple[str, ...]


def merge_results(folders: Sequence[Path], out: Path) -> Merged:
    """Write the runs of all folders into one archive below `out`, and those of `choosing/` into another; copy checkpoints.

    Each key is written once: the first finished result counts, and what `out` has already comes first. Of the runs that chose strengths
    only the accuracies are kept, without losses by epoch and capacities.
    """
    for folder in folders:
        if not Store(folder).all() and not Store(folder / CHOOSING).keys():
            raise ValueError(f"{folder} holds no results to merge; check the path, or train something first: selfless run --out {folder}")
    own = [Path(out)] if Path(out).is_dir() and Path(out) not in folders else []
    places = [*own, *folders]
    path = Path(out) / NAME
    reported = _join([(folder, Store(folder)) for folder in places], path)
    chosen = _join([(folder, Store(folder / CHOOSING)) for folder in places], Path(out) / CHOOSING / NAME, {"history": [], "capacity": []})
    for folder in folders:
        _copy_checkpoints(folder, Path(out))
    return Merged(path, reported.runs + chosen.runs, reported.repeated + chosen.repeated, reported.conflicts + chosen.conflicts)


def _join(stores: Sequence[tuple[Path, Store]], path: Path, without: dict[str, Any] | None = None) -> Merged:
    """Write the runs of the stores into the archive `path`, with the values of `without` in place of their own."""
    found: dict[str, tuple[dict[str, Any], Path]] = {}
    repeated: set[str] = set()
    conflicts: dict[str, str] = {}
    for folder, store in stores:
        for result in store.all():
            key, values = result.run.key, json.loads(json.dumps(result.as_dict() | (without or {})))
            if key not in found:
                found[key] = values, folder
                continue
            before, kept = found[key]
            repeated.add(key)
            if before["status"] != "done" and values["status"] == "done":
                found[key] = values, folder
            elif before["accuracy"] != values["accuracy"] and values["status"] == "done":
                conflicts[key] = f"{key}: {kept}, {folder}"
    if found:
        write_archive(path, [values for values, _ in found.values()])
    return Merged(path, len(found), len(repeated), tuple(conflicts.values()))


def _copy_checkpoints(folder: Path, out: Path) -> None:
    """Copy the trained networks that `out` does not have yet; figures are drawn from some of them."""
    for file in sorted(folder.glob(f"*/{TENSORS}")):
        to = out / file.parent.name / TENSORS
        if not to.exists():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, to)
