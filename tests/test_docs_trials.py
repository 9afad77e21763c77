"""Numbers of recorded trials in the documentation: the replay baselines, which use old data, and forecasts."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from selfless.capacity import forecast
from selfless.capacity.trend import fitted
from selfless.metrics import forgetting
from selfless.runner.store import Store

ROOT = Path(__file__).parent.parent
TRIAL = ROOT / "results/trials/replay"


def spread(values: list[float]) -> str:
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}".replace("-", "−")


def test_the_table_of_replay_is_that_of_the_recorded_runs() -> None:
    """Average and lost points of each method, from the runs without held-out data; and the page has the table."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for result in Store(TRIAL).all():
        if result.run.held_out == 0:
            A = np.where(np.tri(len(result.accuracy)) > 0, result.accuracy, np.nan)
            groups.setdefault(dataclasses.replace(result.run, seed=0).canonical(), []).append((100 * result.average, 100 * forgetting(A)))
    assert {len(group) for group in groups.values()} == {3}
    recorded = {tuple(map(spread, map(list, zip(*group, strict=True)))) for group in groups.values()}
    table = (TRIAL / "table.md").read_text(encoding="utf-8").strip()
    assert {(row.split(" | ")[3], row.strip("| ").split(" | ")[4]) for row in table.splitlines()[2:]} == recorded
    page = (ROOT / "docs/choosing.md").read_text(encoding="utf-8")
    found = re.search(r"^<!-- replay -->\n(.*?)\n<!-- /replay -->$", page, re.S | re.M)
    assert found is not None
    assert found.group(1) == table
    for row in table.splitlines()[2:]:
        assert ("uses old data" in row) == ("`replay:" in row or "`der:" in row)


@pytest.mark.parametrize("path", sorted((ROOT / "results/trials/capacity").glob("forecast*.json")), ids=lambda path: path.stem)
def test_the_table_of_forecasts_is_that_of_the_record(path: Path) -> None:
    """What was said, what happened, and how often it was right; the block of forecast-128.json is called forecasts-128."""
    record = json.loads(path.read_text(encoding="utf-8"))
    page = (ROOT / "docs/lab-notes/capacity.md").read_text(encoding="utf-8")
    block = f"forecasts{path.stem.removeprefix('forecast')}"
    found = re.search(rf"^<!-- {block} -->\n(.*?)\n<!-- /{block} -->$", page, re.S | re.M)
    assert found is not None
    rows = [row.strip("| ").split(" | ") for row in found.group(1).splitlines()[2:]]
    recorded = [one for one in record["forecasts"] if not one["lost_before"]]
    assert len(rows) == len(recorded)
    for row, one in zip(rows, recorded, strict=True):
        accuracy = np.array(record["accuracy"][one["case"]][one["method"]])
        again = forecast(accuracy[:, : one["known"]], one["margin"])
        words = ["no limit" if math.isinf(n) else f"{n:.0f}" for n in (again.more, again.low, again.high)]
        happened = fitted(accuracy.mean(0), one["margin"], one["known"])
        left = f"all {accuracy.shape[1] - one['known']}" if happened is None else str(happened)
        assert row[1:5] == [f"{100 * one['margin']:.0f}", str(one["known"]), f"{words[0]} ({words[1]} to {words[2]})", left]
        assert row[5] == ("yes" if one["right"] else "no")
    summary = record["summary"]
    assert (
        f"{summary['right']} of these {summary['of']} forecasts are right, and {summary['right_by_seed']} of {summary['of_by_seed']}"
        in page
    )
