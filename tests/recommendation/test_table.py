"""measured.json and the tables of docs/choosing.md are those of the records. After a change of them run `python docs/recommended.py`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from selfless.recommendation.table import FILE, HELD_OUT
from selfless.spec import Run

ROOT = Path(__file__).resolve().parent.parent.parent
spec = importlib.util.spec_from_file_location("recommended", ROOT / "docs" / "recommended.py")
assert spec is not None
assert spec.loader is not None
recommended = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recommended)


def values() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def test_the_table_has_the_best_recorded_row_of_each_preserver() -> None:
    """By the records of experiments alone, which are read fast. Of two records of the same settings that with more seeds counts."""
    best: dict[tuple[str, str], tuple[float, float]] = {}
    cells = sorted((cell for _, cell in recommended.recorded_cells()), key=lambda cell: len(cell["runs"]))
    for cell in {json.dumps(cell["run"], sort_keys=True): cell for cell in cells}.values():
        case, run = recommended.case_of(cell["run"]), Run.from_dict(cell["run"])
        name = f"joint, {run.sparsify.name}" if run.stream.startswith("joint-") else run.preserve.name
        best[case.name, name] = max(best.get((case.name, name), (0.0, 0.0)), (cell["mean"], cell["std"]))
    rows = [(recommended.name_of(recommended.Measured(**row)), row) for row in values()["rows"] if row["chosen_on"] == HELD_OUT]
    rows += [(f"joint, {row['sparsify'].partition(':')[0]}", row) for row in values()["joint"]]
    found = {(row["case"], name): (row["average"], row["std"]) for name, row in rows}
    assert found.keys() == best.keys(), "run: python docs/recommended.py"
    for place, pair in found.items():
        assert pair == pytest.approx(best[place], abs=1e-5), f"{place}: run python docs/recommended.py"


def test_the_page_has_the_table() -> None:
    page = recommended.PAGE.read_text(encoding="utf-8")
    assert recommended.with_tables(page, values()) == page, "run: python docs/recommended.py"


@pytest.mark.whole
def test_times_memory_and_trials_are_the_recorded_ones() -> None:
    assert recommended.table() == values(), "run: python docs/recommended.py"
    page = recommended.RECIPE.read_text(encoding="utf-8")
    assert recommended.with_records(recommended.with_pairs(page, recommended.pairs())) == page, "run: python docs/recommended.py"
