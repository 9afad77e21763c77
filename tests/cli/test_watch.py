"""`selfless watch`: one look, following to the end, for people and for scripts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfless import Run
from selfless.cli import app
from selfless.cli.watch import lines
from selfless.engine.progress import Event
from selfless.runner import Store
from selfless.runner.live import FleetNote, announced
from selfless.runner.study import RunState, Snapshot, StudyReader
from tests.cli.small_commands import small
from tests.warm import WarmProcess

runner = CliRunner()


def test_one_look_at_a_study_of_another_process(tmp_path: Path) -> None:
    runs, store = [Run(seed=seed) for seed in range(3)], Store(tmp_path)
    with announced(runs, store), FleetNote(runs[:2], store) as note:
        note.write(Event(1, 5, "b", 3, 10, [0.5, 0.6], [0.8, 0.9], average=[0.9, 0.94], share=0.3, speed=1234.0, seconds_left=80.0))
        seen = runner.invoke(app, ["watch", str(tmp_path), "--once"])
        parsed = json.loads(runner.invoke(app, ["watch", str(tmp_path), "--once", "--json"]).stdout)
    assert seen.exit_code == 0
    for words in ("3 runs: 1 waiting", "2 running", "permuted-mnist, mlp-128", "mas:0.1 × 2 runs", "task 2/5", "epoch 3/10", "92.0 %"):
        assert words in seen.stdout
    assert "mas:0.1, seed 2  waiting" in seen.stdout
    assert parsed["counts"] == {"running": 2, "waiting": 1, "failed": 0, "stopped": 0, "done": 0}
    assert parsed["runs"][1]["accuracy"] == 0.94
    assert parsed["runs"][0]["progress"]["epoch"] == 3


def test_a_folder_without_runs_says_what_to_do(tmp_path: Path) -> None:
    for folder, words in ((tmp_path, "nothing is training there"), (tmp_path / "none", "there is no folder")):
        done = runner.invoke(app, ["watch", str(folder)])
        assert done.exit_code == 1
        assert words in done.stderr


def test_failures_are_shown_with_their_reason_in_a_narrow_terminal() -> None:
    reason = "the loss was not finite in epoch 1 of task 1 (permutation 1)"
    states = [RunState(str(seed), "mas:0.1", "permuted-mnist", "mlp-128", seed, "failed", reason=reason) for seed in range(5)]
    text = [line.plain for line in lines(Snapshot(tuple(states)), 40)]
    assert max(map(len, text)) <= 40
    assert reason in " ".join(line.strip() for line in text)
    assert "seeds 0–4" in text[2]


def test_runs_that_differ_in_another_setting_than_the_seed_have_no_average() -> None:
    states = [RunState(str(k), "mas:0.1", "permuted-mnist", "mlp-128", 0, "done", accuracy=0.5 + k / 2) for k in range(2)]
    assert [line.plain for line in lines(Snapshot(tuple(states)), 80)][-1] == "mas:0.1, 2 runs of different settings  done"


@pytest.mark.slow
def test_a_study_is_followed_until_it_ends(stream: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "selfless", *small(stream, out, "--seeds", "2", "--epochs", "20", "--workers", "1")]
    with WarmProcess(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as training:
        while not list(out.glob("*/training-*.json")):
            assert training.poll() is None
            time.sleep(0.02)
        seen = runner.invoke(app, ["watch", str(out), "--interval", "0.1"])
        assert training.wait() == 0
        assert training.stderr is not None
        assert "\x1b" not in training.stderr.read()
    assert seen.exit_code == 0, seen.output
    assert "2 runs: 2 done" in seen.stdout.splitlines()[-3]
    assert any("running" in line for line in seen.stdout.splitlines()[:-3])
    assert StudyReader(out).look().is_over
