"""Parts of experiments: exact, deterministic, costed by recorded times; joined, they are the whole."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfless.cli import app
from selfless.cli.parts import train_part
from selfless.experiments import PAPER, experiment
from selfless.experiments.base import EQUAL, Experiment
from selfless.experiments.choosing import RecordedScore, trials
from selfless.experiments.left import left
from selfless.experiments.parts import MOST, completed, partition, plan, read_part, seconds, units
from selfless.experiments.recorded import recorded_scores
from selfless.experiments.reproduce import CHOOSING, count, reproduce, train_together
from selfless.runner.merge import merge_results
from selfless.runner.store import Store
from selfless.spec import Result, Run
from tests.fabricated import score, small, trainer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def study() -> list[Experiment]:
    return [experiment(name, "equal") for name in ("fig-3a", "fig-3a-128", "locality")]


def test_parts_hold_every_cell_once_and_share_no_run(study: list[Experiment]) -> None:
    cells = collections.Counter(id(cell) for one in study for cell in one.cells)
    for n in (1, 2, 5):
        parts = partition(study, 10, n)
        assert [(part.number, part.of) for part in parts] == [(i, n) for i in range(1, n + 1)]
        assert collections.Counter(id(cell) for part in parts for cell in part.cells) == cells
        assert parts == partition(study, 10, n)
        runs = [{run for cell in part.cells for run in cell.candidates} for part in parts]
        assert sum(map(len, runs)) == len(set().union(*runs))
    assert partition(study, 10, 50)[-1].cells == ()


def test_a_plan_fits_and_is_short(study: list[Experiment]) -> None:
    parts = plan(study, 10)
    assert all(part.seconds <= MOST for part in parts)
    work = sum(unit.seconds for unit in units(study, 10))
    assert sum(unit.seconds for part in parts for unit in part.units) == pytest.approx(work)
    tight = plan(study, 10, most=60.0)  # less than one unit takes: the largest unit is the limit
    assert len(tight) > len(parts)
    assert max(len(part.units) for part in tight) >= 1


def test_most_claims_per_second_come_first(study: list[Experiment]) -> None:
    """Parts follow one another: when a part is trained, what it completes can be recorded, and the last part completes the last."""
    parts = partition(study, 10, 3)
    done = completed(study, parts)
    assert sorted(name for names in done for name in names) == sorted(one.name for one in study)
    assert "locality" in done[0]
    assert done[-1] == ["fig-3a-128"]  # it costs as much as fig-3a, and is named after it
    silent = dataclasses.replace(study[0], claims=tuple(dataclasses.replace(claim, ours=True) for claim in study[0].claims))
    assert completed([silent, *study[1:]], partition([silent, *study[1:]], 10, 3))[-1] == ["fig-3a"]  # it decides no claim of the paper


def test_an_expensive_cell_reports_fewer_seeds(tmp_path: Path) -> None:
    made = small()
    few = dataclasses.replace(made, claims=(), cells=tuple(dataclasses.replace(cell, most_seeds=2) for cell in made.cells))
    record = reproduce(few, seeds=4, out=tmp_path, train=trainer(score))
    assert record["seeds"] == [0, 1]
    assert {len(cell["runs"]) for cell in record["cells"] if cell["status"] != "pending"} == {2}
    assert count([few], 4) == count([made], 4) - 2 * 3
    assert sum(unit.seconds for unit in units([few], 4)) == sum(unit.seconds for unit in units([few], 2))


def test_a_record_counts_its_looks(tmp_path: Path) -> None:
    """More seeds in the same folder are another look; the same number is not, and other seeds are another experiment."""

    def looks(seeds: int, first: int = 0) -> list[int]:
        found: list[int] = reproduce(small(), seeds=seeds, out=tmp_path, train=trainer(score), first_seed=first)["looks"]
        return found

    assert [looks(2), looks(2), looks(4), looks(4)] == [[2], [2], [2, 4], [2, 4]]
    assert looks(4, first=10) == [4]


@pytest.mark.slow
def test_the_cost_of_a_run_is_near_its_recorded_time() -> None:
    """The fleets that chose strengths in the second run took between a half and 1.6 times the estimated seconds a run, by stream."""
    recorded: dict[str, list[float]] = {}  # stream → seconds of its fleets
    counts: dict[str, int] = {}
    for line in (ROOT / "results/again/fleets.txt").read_text().splitlines():
        if found := re.fullmatch(r"all: (choosing strengths|training), (\S+), (\d+) runs", line):
            stream = found[2] if found[1] == "choosing strengths" else ""
            counts[stream] = int(found[3])
        elif found := re.match(r"\d+ runs as one fleet on NVIDIA H200: ([\d.]+) s", line):
            recorded.setdefault(stream, []).append(float(found[1]))
    tried = {run for name in PAPER for cell in experiment(name, "ours").cells for run in trials(cell)}
    for stream in ("permuted-mnist", "split-cifar-100", "joint-permuted-mnist", "blurred-cifar-100"):
        estimated = [seconds(run) for run in tried if run.stream == stream]
        more = 20 if stream == "permuted-mnist" else 0  # since then the rule of thumb has got smaller λ
        assert len(estimated) == counts[stream] + more
        assert 0.5 < sum(recorded[stream]) / sum(estimated) < 1.6, stream


def test_parts_joined_are_the_whole(tmp_path: Path) -> None:
    """Two parts with a fake trainer, merged: the same command without --part trains nothing and writes the same record."""
    made = small(profile="equal")
    made = dataclasses.replace(made, cells=tuple(dataclasses.replace(cell, choice=EQUAL) for cell in made.cells))
    whole = reproduce(made, seeds=3, out=tmp_path / "whole", train=trainer(score))
    parts = partition([made], 3, 2)
    for part in parts:
        train_together(part.cells, seeds=3, out=tmp_path / f"part-{part.number}", train=trainer(score))
        train_together(part.cells, seeds=3, out=tmp_path / f"part-{part.number}", train=trainer(score))  # resumed: nothing changes
    merged = merge_results([tmp_path / "part-1", tmp_path / "part-2"], tmp_path / "all")
    assert (merged.repeated, merged.conflicts) == (0, ())
    assert merge_results([tmp_path / "part-2"], tmp_path / "all").runs == merged.runs  # merging again adds nothing

    def read(runs: Sequence[Run], place: Path, what: str) -> list[Result]:
        found = [Store(place).load(run) for run in runs]
        assert None not in found, "a run is missing after merging"
        return found  # type: ignore[return-value]

    joined = reproduce(made, seeds=3, out=tmp_path / "all", train=read)
    assert joined["cells"] == whole["cells"]
    assert (joined["choices"], joined["claims"]) == (whole["choices"], whole["claims"])


def test_conflicts_are_named_and_a_finished_run_counts(tmp_path: Path) -> None:
    run, failed = small().cells[0].candidates
    trainer(lambda run: 0.5)([run], tmp_path / "a", "")
    trainer(lambda run: 0.6)([run], tmp_path / "b", "")
    trainer(score, fails=lambda run: True)([failed], tmp_path / "a", "")
    trainer(score)([failed], tmp_path / "b", "")
    (tmp_path / "b" / run.key / "checkpoint.safetensors").write_bytes(b"x")
    merged = merge_results([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert (merged.runs, merged.repeated) == (2, 2)
    assert merged.conflicts == (f"{run.key}: {tmp_path / 'a'}, {tmp_path / 'b'}",)
    kept = Store(tmp_path / "c").get(run.key)
    assert kept is not None
    assert kept.average == pytest.approx(0.5, abs=0.02)
    assert Store(tmp_path / "c").get(failed.key).status == "done"  # type: ignore[union-attr]
    assert (tmp_path / "c" / run.key / "checkpoint.safetensors").is_file()


@pytest.mark.parametrize("text", ["2", "0/3", "4/3", "a/b", "1/", "-1/2"])
def test_a_part_is_written_i_of_n(text: str) -> None:
    assert read_part("2/6") == (2, 6)
    with pytest.raises(ValueError, match="write i/n with 1 ≤ i ≤ n"):
        read_part(text)


def test_the_plan_on_the_command_line() -> None:
    done = CliRunner().invoke(app, ["reproduce", "fig-3a", "--profile", "equal", "--seeds", "10", "--plan", "--json"])
    assert done.exit_code == 0, done.output
    value = json.loads(done.stdout)
    assert [part["part"] for part in value["parts"]] == [f"{i}/{len(value['parts'])}" for i in range(1, len(value["parts"]) + 1)]
    assert all(0 < part["seconds"] <= MOST for part in value["parts"])
    assert "SLNID (CIFAR 256)" in {cell for part in value["parts"] for cell in part["cells"]}
    done = CliRunner().invoke(app, ["reproduce", "fig-2", "--quick", "--seeds", "2", "--plan", "--part", "1/2"], terminal_width=200)
    assert done.exit_code == 0, done.output
    assert "2 parts, 2 seeds; estimated seconds on one H200" in done.stdout
    assert "2/2" in done.stdout


def test_a_plan_says_what_is_left(tmp_path: Path) -> None:
    """Before anything is recorded, after one of three rows, after choosing alone, and after everything; a failed run is not left."""
    made = small(profile="equal")
    made = dataclasses.replace(made, cells=tuple(dataclasses.replace(cell, choice=EQUAL) for cell in made.cells))
    parts = partition([made], 3, 1)

    def seconds_left(out: Path, recorded: Mapping[str, RecordedScore] | None = None) -> float:
        return left(parts[0].cells, range(3), out, recorded or {})

    whole = seconds_left(tmp_path / "new")
    assert whole == pytest.approx(sum(unit.seconds for unit in parts[0].units))
    assert not (tmp_path / "new").exists()
    train_together(made.cells[:1], seeds=3, out=tmp_path / "row", train=trainer(score))
    assert 0 < seconds_left(tmp_path / "row") < whole
    reproduce(made, seeds=3, out=tmp_path / "all", train=trainer(score, fails=lambda run: run.seed == 2))
    assert seconds_left(tmp_path / "all") == 0
    fourth = left(parts[0].cells, range(4), tmp_path / "all", {})
    assert fourth == pytest.approx(sum(seconds(cell.candidates[0]) for cell in made.cells if cell.candidates))
    shutil.rmtree(tmp_path / "all" / CHOOSING)  # the record has the scores
    assert seconds_left(tmp_path / "all", recorded_scores(tmp_path / "all")) == 0


def test_a_plan_of_nothing_says_why(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["reproduce", "table-2", "--plan", "--data-dir", str(tmp_path)])
    assert done.exit_code == 1
    assert "nothing can be run: table-2" in done.stderr


def test_a_part_is_trained_and_says_what_comes_next(tmp_path: Path) -> None:
    study, trained = [small()], list[tuple[str, int]]()
    said = train_part(study, "1/2", 2, 0, tmp_path, trainer(score, trained), {})
    assert said.startswith(f"part 1/2 is trained in {tmp_path}. When every part is: selfless results merge")
    assert trained
    assert train_part(study, "900/900", 2, 0, tmp_path, trainer(score), {}) == (
        "part 900/900 is empty: there are fewer sets of runs than parts"
    )
