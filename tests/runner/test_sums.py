"""Sums of preservers and of sparsifiers in runs: written, trained, recorded, found again and reported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from numpy.testing import assert_array_equal
from typer.testing import CliRunner

import selfless
from selfless import MAS, SLNID, DeCov, LwF, Run
from selfless.cli import app
from selfless.runner.store import Store
from tests.runner.small_runs import BASE

PRESERVE, SPARSIFY = "lwf:1+mas:0.1", "slnid:0.001+decov:0.001"
runner = CliRunner()


def summed(stream: str, **fields: object) -> Run:
    terms = {"preserve": LwF(1.0) + MAS(0.1), "sparsify": SLNID(1e-3) + DeCov(1e-3)}
    return Run(stream=stream, **(BASE | terms | {"epochs": 1} | fields))  # type: ignore[arg-type]


def test_a_run_with_sums_round_trips(tasks_npz: str) -> None:
    run = summed(tasks_npz)
    read = Run.from_dict(json.loads(json.dumps(run.as_dict())))
    assert read == run
    assert read.key == run.key
    assert (str(read.preserve), str(read.sparsify)) == (PRESERVE, SPARSIFY)
    assert summed(tasks_npz, preserve=PRESERVE, sparsify=SPARSIFY) == run
    assert len({run.key, summed(tasks_npz, preserve=LwF(1.0)).key, summed(tasks_npz, sparsify=SLNID(1e-3)).key}) == 3


def test_a_run_with_sums_is_recorded_and_found_again(tasks_npz: str, tmp_path: Path) -> None:
    run = summed(tasks_npz)
    first = selfless.train(run, out=tmp_path)
    assert first.status == "done"
    found = Store(tmp_path).load(run)
    assert found is not None
    assert found.run == run
    assert_array_equal(found.accuracy, first.accuracy)
    assert selfless.train(run, out=tmp_path).about == first.about  # nothing was trained again


@pytest.fixture(scope="module")
def recorded(tasks_npz: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of the command line: one with sums, one without."""
    out = tmp_path_factory.mktemp("sums")
    words = ["run", "--stream", tasks_npz, "--model", "mlp-12", "--epochs", "1", "--batch", "50", "--lr", "0.05", "--out", str(out)]
    for terms in (["--preserve", "lwf:1+mas:0.1", "--sparsify", "slnid:1e-3+decov:1e-3"], ["--preserve", "mas:0.1"]):
        done = runner.invoke(app, [*words, *terms])
        assert done.exit_code == 0, done.output
        assert terms[1] in " ".join(done.output.split())
    return out


@pytest.mark.parametrize("form", ["md", "csv", "latex"])
def test_the_tables_name_every_part_of_a_sum(recorded: Path, form: str) -> None:
    done = runner.invoke(app, ["report", str(recorded), "--format", form])
    assert done.exit_code == 0, done.output
    text = done.stdout.replace("{}", "").replace("\\", "")
    for part in ("lwf:1", "mas:0.1", "slnid:0.001", "decov:0.001"):
        assert part in text
    if form == "csv":
        rows = [line for line in text.splitlines() if "lwf:1" in line]
        assert {line.count(",") for line in rows} == {text.splitlines()[0].count(",")}


@pytest.mark.slow
def test_the_page_names_every_part_of_a_sum(recorded: Path, tmp_path: Path) -> None:
    done = runner.invoke(app, ["report", str(recorded)])
    assert done.exit_code == 0, done.output
    page = (recorded / "report.html").read_text(encoding="utf-8")
    assert PRESERVE in re.sub(r"\s+", " ", page)
    assert SPARSIFY in re.sub(r"\s+", " ", page)
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    shown = runner.invoke(app, ["capacity", str(recorded), "--json"])
    assert len(json.loads(shown.stdout)["runs"]) == 2


def test_tune_scales_the_parts_of_a_sum_together(tasks_npz: str, tmp_path: Path) -> None:
    words = [
        "tune",
        "--stream",
        tasks_npz,
        "--model",
        "mlp-8",
        "--epochs",
        "1",
        "--batch",
        "50",
        "--seeds",
        "1",
        "--strengths",
        "1e-3,1e-2",
        "--workers",
        "1",
    ]
    done = runner.invoke(app, [*words, "--sparsify", "slnid:1 + decov:0.1", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert [row["method"] for row in shown["candidates"]] == ["none", "slnid:0.001+decov:0.0001", "slnid:0.01+decov:0.001"]
    assert shown["largest"] in (1e-3, 1e-2, 0.0)


def test_a_sum_that_cannot_be_is_one_message(tasks_npz: str, tmp_path: Path) -> None:
    done = runner.invoke(app, ["run", "--stream", tasks_npz, "--preserve", "packnet:0.5+hat:0.1", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "cannot be combined" in " ".join(done.output.split())
