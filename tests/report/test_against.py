"""Two folders of records compared: what agrees, what was chosen otherwise, what moved."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from selfless.cli import app
from selfless.report.against import against, records
from selfless.report.records import read

ROOT = Path(__file__).resolve().parents[2]


def _record(mean: float, std: float = 0.4, method: str = "mas:1", verdict: str = "holds", **changes: Any) -> dict[str, Any]:
    cell = {"row": "SLNID", "column": "CIFAR 256", "value": "average", "unit": "%", "mean": mean, "std": std, "method": method}
    claim = {"text": "SLNID is ahead", "verdict": verdict}
    made = {
        "format": 1,
        "name": "fig-3a",
        "profile": "ours",
        "quick": False,
        "cells": [cell | {"runs": [{"value": mean}] * 4}],
        "claims": [claim],
    }
    return made | changes


def test_the_same_is_nothing_to_tell() -> None:
    said = against([_record(61.5)], [_record(61.5)], ("a", "b"))
    assert "1 values" in said
    assert "0 of another choice, 0 moved by more than two standard errors" in said
    assert "1 of 1 verdicts are the same, 0 opposite." in said
    assert "|" not in said


@pytest.mark.parametrize(("mean", "moved"), [(61.5, False), (62.0, False), (62.1, True), (60.0, True)])
def test_a_mean_has_moved_beyond_two_standard_errors(mean: float, moved: bool) -> None:
    """√(0.4²/4 + 0.4²/4) = 0.283: two of them are 0.566."""
    said = against([_record(61.5)], [_record(mean)], ("a", "b"))
    assert ("| moved |" in said) is moved


def test_one_seed_has_no_spread_and_does_not_move() -> None:
    alone = _record(61.5)
    alone["cells"][0] |= {"std": None, "runs": [{"value": 61.5}]}
    assert "0 moved" in against([alone], [_record(50.0)], ("a", "b"))


def test_a_failed_run_does_not_count() -> None:
    """Of one's four runs two are left: √(0.4²/4 + 0.4²/2) = 0.346, and 0.6 is no longer two of them."""
    less = _record(62.1)
    less["cells"][0]["runs"][2:] = [{"value": None}] * 2
    assert "1 moved" in against([_record(61.5)], [_record(62.1)], ("a", "b"))
    assert "0 moved" in against([_record(61.5)], [less], ("a", "b"))


def test_another_choice_and_another_verdict_are_told() -> None:
    said = against([_record(61.5)], [_record(61.6, method="mas:3", verdict="undecided")], ("mine", "yours"))
    assert "| fig-3a | SLNID is ahead | holds | undecided |" in said
    assert "| fig-3a | SLNID, CIFAR 256 | 61.50 ± 0.40 | 61.60 ± 0.40 | +0.10 | another choice: mas:3 |" in said
    assert "0 of 1 verdicts" in said


def test_only_what_is_in_both_counts() -> None:
    empty = _record(0.0)
    empty["cells"][0]["mean"] = None
    for other in (_record(1.0, name="fig-2"), _record(1.0, profile="paper"), _record(1.0, quick=True)):
        with pytest.raises(ValueError, match="a and b have no experiment in common"):
            against([_record(61.5)], [other], ("a", "b"))
    assert "1 values" in against([_record(61.5), _record(1.0, name="fig-2")], [_record(61.5)], ("a", "b"))
    assert "0 values" in against([_record(61.5)], [empty], ("a", "b"))
    quick = _record(61.5, quick=True)
    assert "0 of 0 verdicts" in against([quick], [quick], ("a", "b"))  # a quick version proves nothing


def test_claims_of_the_paper_are_counted_apart() -> None:
    """Two of the paper's, one of which differs, and one of ours."""
    claims = [{"text": text, "verdict": "holds", "ours": text == "Ours"} for text in ("A", "B", "Ours")]
    other = [claims[0], claims[1] | {"verdict": "undecided"}, claims[2]]
    said = against([_record(61.5, claims=claims)], [_record(61.5, claims=other)], ("a", "b"))
    assert "2 of 3 verdicts are the same (of the paper's claims 1 of 2), 0 opposite." in said


def test_a_folder_with_more_seeds_is_compared_by_those_of_the_other(tmp_path: Path) -> None:
    """Ten seeds of figure 3a beside the first five of the same ten: nothing differs, although ten seeds decide more."""
    from selfless.experiments import experiment
    from selfless.experiments.reproduce import of_seeds

    ten = read(ROOT / "results/reproduction/experiments/fig-3a-ours.json")
    assert ten["seeds"] == list(range(10))
    five = of_seeds(ten, experiment("fig-3a", record=ten), range(5))
    assert [claim["verdict"] for claim in five["claims"]] != [claim["verdict"] for claim in ten["claims"]]
    for name, record in (("ten", ten), ("five", five)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "fig-3a-ours.json").write_text(json.dumps(record), encoding="utf-8")
    for one, other in (("ten", "five"), ("five", "ten")):
        said = CliRunner().invoke(app, ["report", str(tmp_path / one), "--against", str(tmp_path / other)]).output
        assert "0 moved by more than two standard errors" in said
        assert "half of them within 0.00" in said
        assert "|" not in said  # no verdict and no value differs


def test_records_are_read_alone_or_below_results(tmp_path: Path) -> None:
    for folder in (tmp_path / "alone", tmp_path / "results" / "experiments"):
        folder.mkdir(parents=True)
        (folder / "fig-3a-ours.json").write_bytes((ROOT / "results/reproduction/experiments/fig-3a-ours.json").read_bytes())
    assert records(tmp_path / "alone")[0]["cells"] == records(tmp_path / "results")[0]["cells"]
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="holds no record of an experiment; make one"):
        records(tmp_path / "none")


def test_the_second_run_is_compared_as_it_is() -> None:
    """`make tables` after every change of the records or of how they are compared."""
    done = CliRunner().invoke(app, ["report", str(ROOT / "results/reproduction"), "--against", str(ROOT / "results/again")])
    assert done.exit_code == 0
    assert done.stdout == (ROOT / "results/again/against.md").read_text(encoding="utf-8"), "run make tables: against.md is old"


def test_the_seeds_of_a_folder_are_split(tmp_path: Path) -> None:
    """Every value by the first seeds stands beside that by the next, and claims without seeds in one half are left out."""
    said = CliRunner().invoke(app, ["report", str(ROOT / "results/equal"), "--split", "60"])
    assert said.exit_code == 0
    assert said.output.startswith("# The first 60 seeds against the next 60\n\n3 experiments in both.")
    cells = {(c["row"], c["column"]): c for c in read(ROOT / "results/equal/experiments/fig-2-equal.json")["cells"]}
    moved = re.findall(r"^\| fig-2 \| ([^,|]+), ([^|]+) \| (\S+) ± \S+ \| (\S+) ±", said.output, re.MULTILINE)
    for row, column, *means in moved:
        for half, mean in enumerate(means):
            values = [run["value"] for run in cells[row, column]["runs"] if run["seed"] // 60 == half]
            assert float(mean) == pytest.approx(sum(values) / 60, abs=0.006)
    refused = CliRunner().invoke(app, ["report", str(ROOT / "results/reproduction"), "--split", "10"])
    assert refused.exit_code != 0
    assert "no experiment in" in refused.output
    assert "has 20 seeds" in refused.output
