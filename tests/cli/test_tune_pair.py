"""`selfless tune --preserve`: both strengths, a plot, and a file that `run --config` takes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfless import SLNID, Result, Run
from selfless.cli.app import app
from selfless.cli.tune import nothing_to_suggest
from selfless.cli.tune_pair import Stage, finish, to_toml
from selfless.experiments.choosing import Selection
from selfless.runner import TrainOptions
from selfless.runner.plan import plan
from tests.fabricated import result

runner = CliRunner()


@pytest.mark.slow
def test_tune_chooses_both_strengths_draws_and_writes(stream: str, tmp_path: Path) -> None:
    where = ["--out", str(tmp_path / "out"), "--plot", str(tmp_path / "tune.png"), "--write", str(tmp_path / "mine.toml")]
    small = ["--stream", stream, "--model", "mlp-8", "--epochs", "8", "--batch", "10", "--seeds", "1", "--workers", "1", "--device", "cpu"]
    grids = ["--preserve", "mas", "--strengths", "1e-4", "--preserve-strengths", "0.1,1"]
    done = runner.invoke(app, ["tune", *small, *grids, *where, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    tried = [row["strength"] for row in found["candidates"] if row["kind"] == "preserve"]
    assert {0.0, 0.1, 1.0} <= set(tried) <= {0.0, 0.001, 0.01, 0.1, 1.0, 10.0, 100.0}
    assert [row["strength"] for row in found["candidates"] if row["kind"] == "sparsify"] == [0.0, 1e-4]
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")
    (run,) = plan(tmp_path / "mine.toml", {}).runs
    assert (str(run.preserve), str(run.sparsify)) == (found["chosen"]["preserve"], found["chosen"]["sparsify"])
    assert (run.stream, run.model, run.batch) == (stream, "mlp-8", 10)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--preserve", "packnet"], "tune cannot choose the strength of packnet"),
        (["--preserve", "mass"], "mass"),
        (["--plot", "tune.pdf"], "try --plot tune.png"),
        (["--preserve", "none"], "tune cannot choose the strength of none; leave the preserver out"),
        (["--preserve", "mas", "--sparsify", "none"], "tune chooses the strength of a sparsifier first"),
        (["--preserve", "mas", "--preserve-strengths", "a"], "--preserve-strengths is 'a'"),
        (["--preserve", "mas", "--preserve-strengths", "1,inf"], "every strength must be a finite number above 0"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_is_trained(flags: list[str], words: str, tmp_path: Path) -> None:
    done = runner.invoke(app, ["tune", *flags, "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert words in done.output.replace("\n", " ")
    assert not list(tmp_path.iterdir())


def test_a_strength_that_is_not_tried_is_said(tmp_path: Path) -> None:
    flags = ["--sparsify", "slnid:0.5", "--preserve", "packnet", "--out", str(tmp_path)]  # refused after the note
    assert "note: tune tries the strengths of --strengths, and slnid:0.5 is not among them" in runner.invoke(app, ["tune", *flags]).output
    for text in ("slnid", "slnid:0.03", "slnid:0.5+decov:0.1"):
        assert "not among them" not in runner.invoke(app, ["tune", "--sparsify", text, *flags[2:]]).output


def test_strengths_that_are_all_alike_choose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfless.cli.tune_pair.train_with_progress", lambda runs, *_, **__: [result(run, 0.1) for run in runs])
    with pytest.raises(
        ValueError, match=r"λ_Ω: Nothing to suggest: 10\.0 % on 400 held-out images is what guessing among 10 classes gives"
    ):
        finish(stage(1), "mas", [1.0], TrainOptions(), None, tmp_path / "a.toml", as_json=False, held_out=(200, 10))
    assert not list(tmp_path.iterdir())
    assert nothing_to_suggest([(10.0,), (10.5,)], (200, 10)) == ""


def stage(index: int | None) -> Stage:
    candidates = [Run(sparsify=SLNID(s)) for s in (0.0, 1e-3)]
    return Stage(candidates[0], candidates, Selection(index, ((90.0, 91.0), (89.5, 90.5))), 0.5, 1.0, 0, 2, (0, 1))


def test_both_choices_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """λ_Ω = 1 is as good as the best, λ_Ω = 10 is not, and λ_Ω = 100 fails."""
    scores = {0.0: 0.9, 1.0: 0.9, 10.0: 0.5, 100.0: 0.9}

    def train(runs: list[Run], *_: object, **__: object) -> list[Result]:
        found = [(run, float(run.preserve.fixed_strength)) for run in runs]
        return [result(run, scores[s], status="failed" if s == 100 else "done") for run, s in found]

    monkeypatch.setattr("selfless.cli.tune_pair.train_with_progress", train)
    finish(stage(1), "mas", [1.0, 10.0, 100.0], TrainOptions(), tmp_path / "a.png", tmp_path / "a.toml", as_json=False)
    shown = capsys.readouterr().out
    assert "Held-out accuracy on tasks 1 to 2 (%), with slnid:0.001" in shown
    rows = {line.split()[1]: line for line in shown.splitlines() if "mas:" in line and "│" in line}
    assert "← largest within 1 points of the best" in rows["mas:1"]
    assert "failed" in rows["mas:100"]
    assert "50.00" in rows["mas:10"]
    assert "Suggested: --preserve mas:1 --sparsify slnid:0.001" in shown
    assert f"The plot: {tmp_path / 'a.png'}\nThe settings: {tmp_path / 'a.toml'}" in shown
    assert "largest that was tried" not in shown
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert str(plan(tmp_path / "a.toml", {}).runs[0].preserve) == "mas:1"
    finish(stage(1), None, [], TrainOptions(), None, None, as_json=False)
    assert capsys.readouterr().out == ""
    scores[1.0] = 0.8995
    finish(stage(1), "mas", [1.0], TrainOptions(), None, None, as_json=False)
    assert "mas:1 is the largest that was tried" in " ".join(capsys.readouterr().out.split())


def test_a_grid_grows_where_its_best_stands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The best λ_Ω is 100, beyond the given 1 and 10; what was trained once is not trained again."""
    trained: list[float] = []

    def train(runs: list[Run], *_: object, **__: object) -> list[Result]:
        trained.extend(run.preserve.fixed_strength for run in runs if run.seed == 0)
        return [result(run, {0.0: 0.5, 1.0: 0.6, 10.0: 0.7, 100.0: 0.8}.get(run.preserve.fixed_strength, 0.4)) for run in runs]

    monkeypatch.setattr("selfless.cli.tune_pair.train_with_progress", train)
    grows = dataclasses.replace(stage(1), extend=2, drop=0.0)
    finish(grows, "mas", [1.0, 10.0], TrainOptions(), None, None, as_json=False)
    assert trained == [0, 1, 10, 100, 1000]
    shown = capsys.readouterr().out
    assert "Suggested: --preserve mas:100" in shown
    assert "was tried" not in shown
    finish(dataclasses.replace(grows, extend=0), "mas", [10.0, 1000.0], TrainOptions(), None, None, as_json=False)
    assert "mas:10 is the smallest that was tried" in " ".join(capsys.readouterr().out.split())


def test_strengths_that_all_fail_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="every strength failed; try a smaller --lr or smaller --strengths"):
        finish(stage(None), None, [], TrainOptions(), None, None, as_json=False)
    monkeypatch.setattr(
        "selfless.cli.tune_pair.train_with_progress", lambda runs, *_, **__: [result(r, 0.9, status="failed") for r in runs]
    )
    with pytest.raises(ValueError, match="every strength of the preserver failed; try a smaller --lr or smaller --preserve-strengths"):
        finish(stage(0), "mas", [1.0], TrainOptions(), None, None, as_json=False)


def test_settings_go_through_toml(tmp_path: Path) -> None:
    run = Run(preserve="lwf:1", sparsify="slnid:1e-3+decov:1e-4", lr=0.03, schedule="cosine", stream_options={"limit": 100})
    (tmp_path / "a.toml").write_text(to_toml(run))
    assert plan(tmp_path / "a.toml", {}).runs == [run]
    assert "preserve =" not in to_toml(run, tuned=False)
