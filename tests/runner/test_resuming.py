"""Results as a cache: an interrupted run goes on, two processes train a run once, changed data is trained again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import selfless
from selfless import Run
from selfless.runner.store import Store
from tests.runner.small_runs import BASE, NET, command, flags, stopping


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 130), (signal.SIGINT, 130)])
def test_a_killed_command_goes_on_and_ends_with_the_same_numbers(tasks_npz: str, tmp_path: Path, how: signal.Signals, code: int) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = flags(tasks_npz)
    whole = subprocess.run(command(*words, "--out", str(tmp_path / "whole"), "--json"), capture_output=True, text=True, env=environment)
    assert whole.returncode == 0, whole.stderr
    process = subprocess.Popen(
        command(*words, "--out", str(tmp_path / "cut")), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    deadline = time.monotonic() + 60
    while not (lines := [p.read_text().count("\n") for p in (tmp_path / "cut").glob("*/log.jsonl")]) or lines[0] < 7:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.005)
    process.send_signal(how)
    process.communicate()
    assert process.returncode == code
    assert not list((tmp_path / "cut").glob("*/metrics.json"))
    again = subprocess.run(command(*words, "--out", str(tmp_path / "cut"), "--json"), capture_output=True, text=True, env=environment)
    assert again.returncode == 0, again.stderr
    a, b = json.loads(whole.stdout)["runs"][0], json.loads(again.stdout)["runs"][0]
    for key in ("accuracy", "history", "capacity", "summary", "key"):
        assert a[key] == b[key]
    epochs = [p.read_text().count('"evaluated": false') for p in (tmp_path / "cut").glob("*/log.jsonl")]
    assert epochs[0] <= 3 * 40 + 1  # at most one epoch was trained twice


def test_two_processes_train_a_run_once(tasks_npz: str, tmp_path: Path) -> None:
    words = command(*flags(tasks_npz), "--out", str(tmp_path), "--json")
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [p.communicate() for p in both]
    assert [p.returncode for p in both] == [0, 0], outputs
    first, second = (json.loads(out) for out, _ in outputs)
    assert first["runs"] == second["runs"]
    logs = [p.read_text().count('"evaluated": false') for p in tmp_path.glob("*/log.jsonl")]
    assert logs == [3 * 40]


def test_force_trains_again_after_another_process(tasks_npz: str, tmp_path: Path) -> None:
    words = command(*flags(tasks_npz), "--out", str(tmp_path), "--json")
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True)]
    time.sleep(2.0)
    both.append(subprocess.Popen([*words, "--force"], stdout=subprocess.PIPE, text=True))
    outputs = [json.loads(p.communicate()[0]) for p in both]
    assert outputs[0]["runs"][0]["accuracy"] == outputs[1]["runs"][0]["accuracy"]
    log = next(tmp_path.glob("*/log.jsonl")).read_text()
    assert log.count('"evaluated": false') == 3 * 40


def test_a_stopped_fleet_goes_on_whatever_else_is_done(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its members are read from its file, not planned anew from the runs that are missing."""
    monkeypatch.setattr("selfless.engine.checkpoint.SAVING", float("inf"))  # after every epoch, also on a busy machine
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
    epochs: list[int] = []
    got = selfless.train(runs, out=tmp_path / "cut", workers=1, watch=lambda m, e: epochs.append(len(m)))
    assert epochs == [3] * (9 - 5)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.accuracy, b.accuracy, atol=0.026)
    assert not store.unfinished()


def test_one_of_a_stopped_fleet_may_be_trained_meanwhile(tasks_npz: str, tmp_path: Path) -> None:
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
    with pytest.warns(UserWarning, match="its data or network has changed since"):
        result = selfless.train(run, out="out", watch=lambda fleet, event: events.append(event))
    assert len(events) == 9
    assert_array_equal(result.accuracy, selfless.train(run).accuracy)


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
    words = command(
        "run", "--stream", "arrays:my.npz", "--model", "ournet:build", "--epochs", "1", "--seeds", "2", "--out", "json", "--json"
    )
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["runs"]) == 2  # what the factory prints is not in the way


def test_a_damaged_training_file_is_said_and_left(tasks_npz: str, tmp_path: Path) -> None:
    run = Run(stream=tasks_npz, **(BASE | {"epochs": 1}))
    place = Store(tmp_path).training([run])
    place.parent.mkdir(parents=True)
    place.write_bytes(b"nonsense")
    with pytest.warns(UserWarning, match="cannot be continued"):
        assert selfless.train(run, out=tmp_path).status == "done"


def test_a_damaged_result_is_named(tasks_npz: str, tmp_path: Path) -> None:
    run = Run(stream=tasks_npz, **(BASE | {"epochs": 1}))
    selfless.train(run, out=tmp_path)
    (tmp_path / run.key / "metrics.json").write_text("{")
    with pytest.raises(ValueError, match=r"metrics.json is not a result .* --force"):
        selfless.train(run, out=tmp_path)
    assert selfless.train(run, out=tmp_path, force=True).status == "done"
