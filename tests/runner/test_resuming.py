"""Results as a cache: an interrupted run goes on, two processes train a run once, changed data is trained again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from typer.testing import CliRunner

import selfless
from selfless import Run
from selfless.cli import app
from selfless.engine.fleet import Fleet
from selfless.runner.store import Store
from tests.runner.small_runs import BASE, NET, command, flags, stopping
from tests.warm import WarmProcess

pytestmark = pytest.mark.usefixtures("every_epoch_saved")

EPOCHS = 12  # of 13 batches: long enough to be interrupted


def here(words: list[str]) -> dict[str, Any]:
    """Run a command in this process and return its JSON."""
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    value: dict[str, Any] = json.loads(done.stdout)["runs"][0]
    return value


def started(words: list[str]) -> WarmProcess:
    """Start a command in a process of its own."""
    return WarmProcess(command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(process: WarmProcess, folder: Path, lines: int) -> None:
    """Wait until a process has logged so many lines."""
    deadline = time.monotonic() + 120
    while not (counts := [p.read_text().count("\n") for p in folder.glob("*/log.jsonl")]) or counts[0] < lines:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.005)


def epochs(folder: Path) -> list[int]:
    """How many epochs the log of each run has."""
    return [p.read_text().count('"evaluated": false') for p in folder.glob("*/log.jsonl")]


@pytest.fixture(scope="module")
def whole(tasks_npz: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run that nobody interrupts."""
    return here([*flags(tasks_npz, EPOCHS), "--out", str(tmp_path_factory.mktemp("whole"))])


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_killed_command_goes_on_and_ends_with_the_same_numbers(
    tasks_npz: str, whole: dict[str, Any], tmp_path: Path, how: signal.Signals, code: int
) -> None:
    words = [*flags(tasks_npz, EPOCHS), "--out", str(tmp_path)]
    process = started(words)
    wait_for(process, tmp_path, lines=7)
    process.send_signal(how)
    process.communicate()
    assert process.returncode == code
    assert not list(tmp_path.glob("*/metrics.json"))
    again = here(words)
    for key in ("accuracy", "history", "capacity", "summary", "key"):
        assert again[key] == whole[key]
    assert epochs(tmp_path) == [3 * EPOCHS]  # the log has every epoch once
    assert not list(tmp_path.glob("*/training-*"))
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.slow
def test_two_processes_train_a_run_once(tasks_npz: str, tmp_path: Path) -> None:
    words = [*flags(tasks_npz, EPOCHS), "--out", str(tmp_path)]
    other = started([*words, "--json"])
    wait_for(other, tmp_path, lines=1)
    mine = here(words)
    output, error = other.communicate()
    assert other.returncode == 0, error
    assert json.loads(output)["runs"] == [mine]
    assert epochs(tmp_path) == [3 * EPOCHS]


@pytest.mark.slow
def test_force_trains_again_after_another_process(tasks_npz: str, tmp_path: Path) -> None:
    words = [*flags(tasks_npz, EPOCHS), "--out", str(tmp_path)]
    other = started([*words, "--json"])
    wait_for(other, tmp_path, lines=1)
    mine = here([*words, "--force"])
    output, error = other.communicate()
    assert other.returncode == 0, error
    assert json.loads(output)["runs"][0]["accuracy"] == mine["accuracy"]
    assert epochs(tmp_path) == [3 * EPOCHS]


@pytest.mark.slow
def test_a_stopped_fleet_goes_on_whatever_else_is_done(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its members are read from its file, not planned anew from the runs that are missing."""
    runs = [Run(stream=tasks_npz, **(BASE | {"lr": lr})) for lr in (0.05, 0.04, 0.03)]
    want = selfless.train(runs, out=tmp_path / "whole", workers=1)
    seen = 0

    def stop(members: Any, event: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        selfless.train(runs, out=tmp_path / "cut", workers=1, watch=stop)
    store = Store(tmp_path / "cut")
    assert [len(keys) for _, keys in store.unfinished()] == [3]
    selfless.train(runs[2], out=tmp_path / "cut")  # one of them is finished elsewhere meanwhile
    members: list[int] = []
    got = selfless.train(runs, out=tmp_path / "cut", workers=1, watch=lambda m, e: members.append(len(m)))
    assert members == [3] * (9 - 5)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.accuracy, b.accuracy, atol=0.026)
    assert not store.unfinished()


@pytest.mark.slow
def test_one_of_a_stopped_fleet_may_be_trained_meanwhile(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [Run(stream=tasks_npz, **(BASE | {"lr": lr})) for lr in (0.05, 0.06)]
    with pytest.raises(KeyboardInterrupt):
        selfless.train(runs, out=tmp_path, workers=1, watch=stopping(5))
    selfless.train(runs[0], out=tmp_path)
    assert list(tmp_path.glob("*/training-*"))  # the other's progress is still there
    events: list[Any] = []
    results = selfless.train(runs, out=tmp_path, workers=1, watch=lambda fleet, event: events.append(event))
    assert len(events) == 9 - 5  # three tasks of two epochs and an evaluation each
    assert_array_equal(results[1].accuracy, selfless.train(runs[1]).accuracy)
    assert not list(tmp_path.glob("*/training-*"))


def test_a_stopped_run_does_not_go_on_with_another_network(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "changing.py").write_text(NET.format(8))
    run = Run(stream=tasks_npz, **(BASE | {"model": "changing:build"}))
    with pytest.raises(KeyboardInterrupt):
        selfless.train(run, out="out", watch=stopping(5))
    (tmp_path / "changing.py").write_text(NET.format(8).replace("nn.ReLU()", "nn.Tanh()"))
    sys.modules.pop("changing")
    events: list[Any] = []
    with pytest.warns(UserWarning, match="its data, network or method has changed since"):
        result = selfless.train(run, out="out", watch=lambda fleet, event: events.append(event))
    assert len(events) == 9
    assert_array_equal(result.accuracy, selfless.train(run).accuracy)


@pytest.mark.slow
def test_changed_data_and_changed_networks_are_trained_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.Generator(np.random.PCG64(0))
    x, y = rng.integers(0, 256, (80, 1, 6, 6)).astype(np.uint8), np.arange(80) % 4
    np.savez("my.npz", x_train=x, y_train=y, x_test=x, y_test=y, task=y // 2, task_test=y // 2)
    (tmp_path / "ournet.py").write_text(NET.format(8))
    run = Run(stream="arrays:my.npz", model="ournet:build", epochs=1, batch=20)
    first = selfless.train(run, out="out")
    assert selfless.train(run, out="out").about == first.about
    np.savez("my.npz", x_train=x[::-1], y_train=y, x_test=x, y_test=y, task=y // 2, task_test=y // 2)
    second = selfless.train(run, out="out")
    assert second.about["made_from"] != first.about["made_from"]
    (tmp_path / "ournet.py").write_text(NET.format(100))
    sys.modules.pop("ournet")
    third = selfless.train(run, out="out")
    assert third.about["parameters"] != second.about["parameters"]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("warm_workers")
def test_what_a_factory_prints_is_not_in_the_json(
    tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither what it prints in this process nor, by the file descriptor that workers inherit, in theirs. A warning is told once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ournet.py").write_text(NET.format(8))
    words = ["run", "--stream", tasks_npz, "--model", "ournet:build", "--epochs", "1", "--seeds", "2", "--out", "json", "--json"]
    words += ["--preserve", "packnet:0.5", "--scenario", "class"]  # two runs that are no fleet, and each warns
    done = CliRunner().invoke(app, [*words, "--workers", "2"])
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["runs"]) == 2
    assert capfd.readouterr().out == ""
    (line,) = (line for line in done.stderr.splitlines() if line != "hello")
    assert line.startswith("note: PackNet evaluates a task with the parameters it keeps for that task")
    alone = CliRunner().invoke(app, [*words, "--workers", "1", "--force"])
    assert len(json.loads(alone.stdout)["runs"]) == 2


def test_a_damaged_training_file_is_said_and_left(tasks_npz: str, tmp_path: Path) -> None:
    run = Run(stream=tasks_npz, **(BASE | {"epochs": 1}))
    place = Store(tmp_path).training([run])
    place.parent.mkdir(parents=True)
    place.write_bytes(b"nonsense")
    with pytest.warns(UserWarning, match="cannot be continued"):
        assert selfless.train(run, out=tmp_path).status == "done"


def test_a_state_that_does_not_fit_in_memory_now_is_kept(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(stream=tasks_npz, **BASE)
    want = selfless.train(run, out=tmp_path / "whole")

    def stop(_: Any, event: Any) -> None:
        if event.task == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        selfless.train(run, out=tmp_path, watch=stop, workers=1)
    (state,) = tmp_path.rglob("training-*.safetensors")
    before = state.read_bytes()

    def full(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(Fleet, "restore", full)
        with pytest.raises(RuntimeError, match=r"1 stopped run does not fit in the memory .* is kept: free memory"):
            selfless.train(run, out=tmp_path, workers=1)
    assert state.read_bytes() == before
    assert selfless.train(run, out=tmp_path, workers=1).average == want.average
    assert not state.exists()


def test_a_damaged_result_is_named(tasks_npz: str, tmp_path: Path) -> None:
    run = Run(stream=tasks_npz, **(BASE | {"epochs": 1}))
    selfless.train(run, out=tmp_path)
    (tmp_path / run.key / "metrics.json").write_text("{")
    with pytest.raises(ValueError, match=r"metrics.json is not a result .* --force"):
        selfless.train(run, out=tmp_path)
    assert selfless.train(run, out=tmp_path, force=True).status == "done"
