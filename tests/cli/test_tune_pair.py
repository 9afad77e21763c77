"""`selfless tune --preserve`: both strengths, a plot, and a file that `run --config` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfless import Run
from selfless.cli.app import app
from selfless.cli.tune_pair import to_toml
from selfless.runner.plan import plan

runner = CliRunner()


@pytest.mark.slow
def test_tune_chooses_both_strengths_draws_and_writes(stream: str, tmp_path: Path) -> None:
    where = ["--out", str(tmp_path / "out"), "--plot", str(tmp_path / "tune.png"), "--write", str(tmp_path / "mine.toml")]
    small = ["--stream", stream, "--model", "mlp-8", "--epochs", "1", "--batch", "50", "--seeds", "1", "--workers", "1", "--device", "cpu"]
    grids = ["--preserve", "mas", "--strengths", "1e-4", "--preserve-strengths", "0.1,1"]
    done = runner.invoke(app, ["tune", *small, *grids, *where, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [row["strength"] for row in found["candidates"]] == [0.0, 1e-4, 0.0, 0.1, 1.0]
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")
    (run,) = plan(tmp_path / "mine.toml", {}).runs
    assert (str(run.preserve), str(run.sparsify)) == (found["chosen"]["preserve"], found["chosen"]["sparsify"])
    assert (run.stream, run.model, run.batch) == (stream, "mlp-8", 50)


def test_settings_go_through_toml(tmp_path: Path) -> None:
    run = Run(preserve="lwf:1", sparsify="slnid:1e-3+decov:1e-4", lr=0.03, schedule="cosine", stream_options={"limit": 100})
    (tmp_path / "a.toml").write_text(to_toml(run))
    assert plan(tmp_path / "a.toml", {}).runs == [run]
