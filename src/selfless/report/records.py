"""Records of experiments: the JSON files that `selfless reproduce` writes, read and looked up. Their content is not changed.

`marked` adds remarks to each cell: that runs failed, that its runs are missing from the folder, or that the experiment has changed since
(stale).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfless.inputs import check_experiment

Record = dict[str, Any]
Cell = Mapping[str, Any]
Place = tuple[str, str]  # (row, column)

FORMAT = 1
VERDICTS = {"holds": "✓", "fails": "✗", "undecided": "?", "missing": "–"}
NOT_THE_PAPERS = "not in the paper"  # the source of an experiment of our own


def load(folder: Path) -> list[Record]:
    """Return every record below `folder`, by file name."""
    return [read(path) for path in sorted(folder.rglob("experiments/*.json"))]


def read(path: Path) -> Record:
    """Return one record, with the folder of its results as `folder`."""
    try:
        record: Record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"its format is {record['format']}, not {FORMAT}")
        check_experiment(record)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a record of this version ({error}); delete it, or write it again: selfless reproduce") from error
    return record | {"folder": str(path.parent.parent)}


# ------------------------------------------------------------------------------------------------------------------- marks
def marked(record: Record, declared: set[str] | None = None, grids: Mapping[Place, set[str]] | None = None) -> Record:
    """Return the record with `marks` in each cell (see `wording.MEANING`).

    declared   the keys of the runs that the experiment may report today; the first run of a cell decides, the others differ in their seed
    grids      for each cell, the keys of the runs that it is chosen by today
    """
    tried = {
        tuple(place): {key for c in choice["candidates"][: choice.get("declared")] for key in c["keys"][: len(choice["seeds"])]}
        for choice in record["choices"]
        for place in choice["cells"]
    }
    chosen_on_test = {tuple(place) for choice in record["choices"] if choice["by"] == "test" for place in choice["cells"]}
    cells = []
    for cell in record["cells"]:
        keys, place = [run["key"] for run in cell["runs"]], (cell["row"], cell["column"])
        marks = []
        if cell["status"] == "pending":
            marks.append("not run")
        if "failed" in cell["status"]:
            marks.append(cell["status"])
        if any(run_file(record, key) is None for key in keys):
            marks.append("missing")
        if declared is not None and any(key not in declared for key in keys[:1]):
            marks.append("stale")
        elif grids is not None and keys and tried.get(place, set()) != grids.get(place, set()):
            marks.append("other grid")
        if cell["on_test"] or place in chosen_on_test:
            marks.append("on test")
        cells.append(cell | {"marks": marks})
    return record | {"cells": cells}


def run_file(record: Record, key: str) -> Path | None:
    """Return the file that holds a run's result: its metrics.json, or the archive of its folder; None if neither has it."""
    return result_file(Path(record["folder"]), key) if "folder" in record else None


def result_file(folder: Path, key: str) -> Path | None:
    """Return the file in a folder of results that holds the run of that key."""
    from selfless.runner.archive import NAME, read_archive

    file, archive = folder / key / "metrics.json", folder / NAME
    return file if file.is_file() else archive if key in read_archive(archive) else None


# ----------------------------------------------------------------------------------------------------------------- content
def keys(records: Sequence[Record]) -> set[str]:
    """Return the keys of the runs that the records report."""
    return {run["key"] for record in records for cell in record["cells"] for run in cell["runs"]}


def rows_and_columns(record: Record) -> tuple[list[str], list[str]]:
    """Return the names of the rows and of the columns, in the order of the record."""
    return list(dict.fromkeys(c["row"] for c in record["cells"])), list(dict.fromkeys(c["column"] for c in record["cells"]))


def value_label(cell: Cell) -> str:
    """Return what the value of a cell is, for an axis."""
    return "accuracy (%)" if cell.get("unit", "%") == "%" else f"{cell['heading']} ({cell['unit']})"


def by_place(record: Record) -> dict[Place, dict[str, Any]]:
    """Return (row, column) → cell."""
    return {(c["row"], c["column"]): c for c in record["cells"]}


def judged(record: Record) -> list[dict[str, Any]]:
    """Return the claims whose verdicts are shown: none for a quick version, whose values mean nothing."""
    return [] if record["quick"] else record["claims"]


def unjudged(record: Record) -> list[str]:
    """Return the lines that are shown for a quick version instead of its verdicts."""
    texts = [claim["text"] for claim in record["claims"]] if record["quick"] else []
    return ["a quick version judges no claims:", *texts] if texts else []


def is_ours(record: Record, claim: Mapping[str, Any]) -> bool:
    """Return whether a claim is ours, not the paper's."""
    return record["source"] == NOT_THE_PAPERS or bool(claim.get("ours"))


def tally(records: Sequence[Record], ours: bool | None = None) -> dict[str, int]:
    """Count verdicts: of all claims, of ours (ours=True), or of the paper's (ours=False). A claim that repeats another is not counted."""
    found = [
        claim["verdict"]
        for record in records
        for claim in judged(record)
        if not claim.get("repeats") and (ours is None or is_ours(record, claim) is ours)
    ]
    return {verdict: found.count(verdict) for verdict in VERDICTS}
