"""`selfless report` and `selfless capacity` read what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from selfless.cli import app
from tests.cli.small_commands import small
from tests.fabricated import result

runner = CliRunner()


@pytest.mark.slow
def test_report_and_capacity_read_what_was_recorded(stream: str, tmp_path: Path) -> None:
    runner.invoke(app, small(stream, tmp_path, "--sparsify", "slnid:1e-2"))
    page = runner.invoke(app, ["report", str(tmp_path)])
    assert page.exit_code == 0, page.output
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    for form in ("md", "csv", "latex"):
        assert runner.invoke(app, ["report", str(tmp_path), "--format", form]).exit_code == 0
    room = json.loads(runner.invoke(app, ["capacity", str(tmp_path), "--json"]).stdout)
    assert len(room["runs"][0]["capacity"]) == 3
    assert "parameters: all" in runner.invoke(app, ["capacity", str(tmp_path)]).output
    empty = runner.invoke(app, ["report", str(tmp_path / "none")])
    assert empty.exit_code == 1
    assert "has no run 'none'; its newest runs" in empty.output
    (tmp_path / "begun" / "0123456789abcdef").mkdir(parents=True)
    (tmp_path / "begun" / "0123456789abcdef" / "log.jsonl").write_text("{}\n")
    assert "holds no results, but 1 unfinished" in runner.invoke(app, ["report", str(tmp_path / "begun")]).output


def recorded(out: Path, free: float, **fields: Any) -> Any:
    """A result of two tasks as the store would write it; after the second, half of what was `free` after the first."""
    import numpy as np

    from selfless.files import write_json
    from selfless.spec import Result, Run

    run = Run(tasks=2, **fields)
    room = [
        {"tasks": t, "threshold": 0.01, "free_parameters": x, "free_neurons": x / 4, "parameters": {"fc1.weight": x}, "neurons": {"fc1": x}}
        for t, x in ((1, free), (2, free / 2))
    ]
    result = Result(run, np.full((2, 2), 0.9), np.full(2, 0.1), [], room)
    write_json(out / run.key / "metrics.json", result.as_dict())
    return result


def test_figures_and_formats_that_cannot_be_made(tmp_path: Path) -> None:
    recorded(tmp_path, 0.5)
    for words, message in (
        (["--figures", str(tmp_path / "figures")], "holds no experiment to draw; make one: selfless reproduce fig-2 --out"),
        (["--format", "pdf"], "format 'pdf' is unknown; choose html, md, csv, latex, claims or values"),
    ):
        done = runner.invoke(app, ["report", str(tmp_path), *words])
        assert done.exit_code == 1
        assert message in " ".join(done.output.split())


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True])
def test_the_demo_compares_two_runs(as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def train(runs: Any, options: Any, **_: Any) -> Any:
        asked.append((runs, options))
        return [result(run, accuracy) for run, accuracy in zip(runs, (0.8, 0.9), strict=True)]

    monkeypatch.setattr("selfless.cli.demo.train_with_progress", train)
    done = runner.invoke(app, ["demo", "--quick", "--out", str(tmp_path), *(["--json"] if as_json else [])])
    assert done.exit_code == 0, done.output
    ((runs, options),) = asked
    assert [(str(run.sparsify), run.tasks, run.epochs) for run in runs] == [("none", 2, 1), ("slnid:0.001", 2, 1)]
    assert options.out == tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {"accuracy.png", "capacity.png", "report.html"}
    assert ("picture: " in done.output) is not as_json
    if as_json:
        assert len(json.loads(done.stdout)["runs"]) == 2


def test_capacity_of_many_runs_is_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for runs that differ in the seed alone; layers of one run by its folder. Of three runs, every layer of every run."""
    monkeypatch.setenv("COLUMNS", "80")
    place = tmp_path.with_name(f"{tmp_path.name}-few")
    for seed in range(6):
        recorded(tmp_path, 0.4 + 0.032 * seed, seed=seed)
        one = recorded(tmp_path, 0.8, seed=seed, sparsify="slnid:1e-3")
        if seed < 3:
            recorded(place, 0.8, seed=seed)
    few = runner.invoke(app, ["capacity", str(place)]).output
    assert few.count("parameters: fc1.weight") == 3
    recorded(tmp_path, 0.6, model="mlp-64")
    many = runner.invoke(app, ["capacity", str(tmp_path)])
    assert many.exit_code == 0, many.output
    *table, _, hint = many.output.rstrip().splitlines()
    rows = [line.split() for line in table]
    assert [row[-5:] for row in rows if row and row[0].startswith("mas")] == [
        ["6", "12.0", "6.0", "48.0", "24.0"],
        ["6", "20.0", "10.0", "80.0", "40.0"],
        ["1", "15.0", "7.5", "60.0", "30.0"],
    ]
    assert ["permuted-mnist,", "mlp-64"] in rows
    assert "fc1" not in many.output
    assert max(map(len, table)) <= 80
    assert f"selfless capacity {tmp_path}/KEY" in hint
    assert "--json" in hint
    assert "parameters: fc1.weight" in runner.invoke(app, ["capacity", str(tmp_path / one.run.key)]).output
    everything = json.loads(runner.invoke(app, ["capacity", str(tmp_path), "--json"]).stdout)["runs"]
    assert {(r["key"], r["model"]) for r in everything} >= {(one.run.key, "mlp-128")}
    assert len(everything) == 13
