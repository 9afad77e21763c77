"""From an experiment to its record, with results that are made up so that every number is known."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from selfless import Run
from selfless.cli import app
from selfless.data import MissingData
from selfless.experiments import experiment
from selfless.experiments.base import Choice, Claim, more
from selfless.experiments.recorded import recorded_scores
from selfless.experiments.reproduce import judge_again, record_file, reproduce, train_together
from selfless.report import experiments as reporting
from selfless.runner import Store
from selfless.spec import Result
from tests.fabricated import A, B, score, small, trainer


def test_several_experiments_share_their_fleets(tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []
    other = dataclasses.replace(small(), name="table-1", cells=small().cells[:2], claims=())
    train_together([*small().cells, *other.cells], seeds=3, out=tmp_path, train=trainer(score, calls))
    assert calls == [
        ("all: choosing strengths, permuted-mnist", 5 * 2),
        ("all: training, permuted-mnist", 2 * 3),
        ("all: training, joint-permuted-mnist", 3),
    ]


def test_data_that_is_missing_does_not_stop_the_other_streams(tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []
    made = trainer(score, calls)

    def train(runs: Sequence[Run], place: Path, what: str) -> list[Result]:
        if runs[0].stream == "permuted-mnist":
            raise MissingData("there is no MNIST")
        return made(runs, place, what)

    train_together(small().cells, seeds=3, out=tmp_path, train=train)
    assert calls == [("all: training, joint-permuted-mnist", 3)]
    with pytest.raises(MissingData, match="no MNIST"):
        reproduce(small(), seeds=3, out=tmp_path, train=train)


def test_choose_train_measure_judge_record(tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []
    made = small()
    record = reproduce(made, seeds=3, out=tmp_path, train=trainer(score, calls))
    assert calls == [("fig-2: choosing strengths", 5 * 2), ("fig-2: training", 3 * 3)]
    assert json.loads(record_file(tmp_path, made).read_text()) == record
    cells = {(c["row"], c["column"]): c for c in record["cells"]}
    assert cells[A]["method"] == "mas:0.1 + slnid:0.001"
    assert cells[B]["method"] == "mas:0.2"
    values = [run["value"] for run in cells[A]["runs"]]
    assert cells[A]["mean"] == pytest.approx(np.mean(values))
    assert cells[A]["std"] == pytest.approx(np.std(values, ddof=1))
    assert cells[A]["difference"] == pytest.approx(np.mean(values) - 95.83)
    assert len(cells[A]["runs"][0]["detail"]) == 5
    assert cells["later", "MNIST"]["status"] == "pending"
    assert [c["verdict"] for c in record["claims"]] == ["holds", "fails", "fails", "missing"]
    part = record["claims"][0]["parts"][0]
    assert part["low"] <= part["mean"] <= part["high"]
    assert part["mean"] == pytest.approx(np.mean(values) - cells[B]["mean"])
    choice = next(c for c in record["choices"] if c["cells"] == [list(A)])
    assert choice["chosen"] == 1
    assert choice["by"] == "held-out"
    assert record["about"] == record["about"] | {"runs": 19, "failed": 0, "seconds": pytest.approx(19 * 10 / 5), "hardware": ["a machine"]}
    reported = {run["key"] for cell in record["cells"] for run in cell["runs"]}
    assert {result.run.key for result in Store(tmp_path).all()} == reported  # what was chosen by is not listed with it
    for choosing in (tmp_path / "choosing").glob("*/metrics.json"):
        assert json.loads(choosing.read_text())["run"]["held_out"] == 0.1


def test_what_test_data_chose_is_not_trained_again(tmp_path: Path) -> None:
    """The archive of a folder has the reported runs alone; the scores of the others are in the record."""
    made = small()
    chosen = next(cell for cell in made.cells if len(cell.candidates) > 1)
    cell = dataclasses.replace(chosen, choice=Choice("test", (0, 1)))
    made = dataclasses.replace(made, cells=(cell, *(other for other in made.cells if other is not chosen)))
    first = reproduce(made, seeds=3, out=tmp_path, train=trainer(score))
    reported = {run["key"] for one in first["cells"] for run in one["runs"]}
    losers = [place for place in tmp_path.glob("*/metrics.json") if place.parent.name not in reported]
    assert losers != []
    for place in losers:
        shutil.rmtree(place.parent)
    again = reproduce(made, seeds=3, out=tmp_path, train=trainer(score), recorded=recorded_scores(tmp_path))
    assert not [place for place in losers if place.exists()]
    assert (again["choices"], again["cells"]) == (first["choices"], first["cells"])


def test_more_seeds_without_the_runs_that_chose(tmp_path: Path) -> None:
    """The scores in a record are enough; runs on custom files that have changed since, and with --force all, choose again."""
    first = reproduce(small(), seeds=3, out=tmp_path, train=trainer(score))
    shutil.rmtree(tmp_path / "choosing")
    calls: list[tuple[str, int]] = []
    known = recorded_scores(tmp_path)
    again = reproduce(small(), seeds=5, out=tmp_path, train=trainer(score, calls), recorded=known)
    assert calls == [("fig-2: training", 3 * 5)]
    assert again["choices"] == first["choices"]
    assert first["about"] | {"runs": 19 + 6, "seconds": pytest.approx(25 * 10 / 5)} == again["about"]
    shutil.copytree(tmp_path / "experiments", tmp_path / "new" / "experiments")
    fresh = reproduce(small(), seeds=3, out=tmp_path / "new", train=trainer(score), first_seed=10, recorded=known)
    assert (fresh["choices"], fresh["looks"]) == (first["choices"], [3])
    assert fresh["about"]["seconds"] == first["about"]["seconds"]  # ten runs that chose, nine new ones; those of seeds 0 to 4 do not count
    other = json.loads(record_file(tmp_path, small()).read_text())
    (one, two), key = other["choices"][0]["candidates"][:2], other["choices"][0]["candidates"][0]["keys"][0]
    one["scores"][0], two["scores"][0], two["seconds"] = 1.0, None, None
    (tmp_path / "experiments" / "other.json").write_text(json.dumps(other))
    assert known.keys() - recorded_scores(tmp_path).keys() == {key}  # two records disagree; where one failed, the other counts
    (tmp_path / "experiments" / "torn.json").write_text('{"choices": [')
    with pytest.raises(ValueError, match=r"torn\.json is not the record of an experiment"):
        recorded_scores(tmp_path)
    calls.clear()
    changed = {key: dataclasses.replace(one, made_from="a file") for key, one in known.items()}
    reproduce(small(), seeds=3, out=tmp_path, train=trainer(score, calls), recorded=changed)
    assert calls[0] == ("fig-2: choosing strengths", 5 * 2)


def test_what_the_authors_chose_on_is_what_is_reported(tmp_path: Path) -> None:
    made = small()
    cells = tuple(dataclasses.replace(c, choice=Choice("test", (0, 1))) for c in made.cells)
    record = reproduce(dataclasses.replace(made, cells=cells), seeds=3, out=tmp_path, train=trainer(score))
    assert not (tmp_path / "choosing").exists()
    shown = reporting.marked(record | {"folder": str(tmp_path)})
    assert all("on test" in c["marks"] for c in shown["cells"] if c["row"] in ("SLNID", "No-Reg"))
    assert any("optimistic" in line for line in reporting.remarks(shown))


def test_failed_runs_are_shown_and_left_out_of_the_mean(tmp_path: Path) -> None:
    record = reproduce(small(), seeds=3, out=tmp_path, train=trainer(score, fails=lambda run: run.seed == 1 and run.sparsify.strength > 0))
    cell = next(c for c in record["cells"] if c["row"] == "SLNID")
    assert cell["status"] == "partly failed"
    assert [run["value"] is None for run in cell["runs"]] == [False, True, False]
    assert record["claims"][0]["parts"][0]["seeds"] == 2
    record = reproduce(small(), seeds=3, out=tmp_path, train=trainer(score, fails=lambda run: run.sparsify.strength > 0))
    cell = next(c for c in record["cells"] if c["row"] == "SLNID")
    assert (cell["status"], cell["error"]) == ("failed", "all 3 candidates failed while choosing")
    assert record["claims"][0]["verdict"] == "missing"


def test_claims_are_judged_again_by_what_is_recorded(tmp_path: Path) -> None:
    """A claim that was added later, one of every task among them: nothing is trained, every other field stays."""
    made = small()
    record = reproduce(dataclasses.replace(made, claims=made.claims[:1]), seeds=3, out=tmp_path, train=trainer(score))
    every = Claim("in every task", (more(A, B, every_task=True),))
    again = judge_again(record, dataclasses.replace(made, claims=(*made.claims, every)))
    assert [c["verdict"] for c in again["claims"]] == ["holds", "fails", "fails", "missing", "holds"]
    assert again["claims"][0] == record["claims"][0]
    assert again["claims"][-1]["parts"][0]["task"] in range(1, 6)
    assert "on task" in reporting.interval(again["claims"][-1]["parts"][0])
    assert {key for key in record if record[key] != again[key]} == {"claims"}
    with pytest.raises(ValueError, match="not an average"):
        dataclasses.replace(made, cells=tuple(dataclasses.replace(c, value="lost") for c in made.cells), claims=(every,))


def test_judging_from_the_command_line(tmp_path: Path) -> None:
    ask = ["reproduce", "ewc", "--judge", "--out", str(tmp_path)]
    refused = CliRunner().invoke(app, ask)
    assert refused.exit_code == 1
    assert "has no record of ewc in profile ours" in refused.output
    whole = experiment("ewc")
    reproduce(dataclasses.replace(whole, claims=()), seeds=2, out=tmp_path, train=trainer(lambda run: 0.9))
    done = CliRunner().invoke(app, ask)
    assert done.exit_code == 0, done.output
    record = json.loads(record_file(tmp_path, whole).read_text())
    assert [c["text"] for c in record["claims"]] == [c.text for c in whole.claims]
    assert "folder" not in record
