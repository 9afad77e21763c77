"""The network that a run trained: its accuracy is the recorded one, for every preserver, scenario and kind of head."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import selfless
from selfless import Result, Run
from selfless.data import Stream
from selfless.engine.build import build_streams
from selfless.engine.scenario import columns_among
from selfless.preserve import PRESERVERS
from selfless.runner import Store
from tests.whole_runs import BASE, whole


def accuracy(result: Result, stream: Stream, task: int) -> float:
    """The accuracy of `result.model(task)` on the test images of a task, as the data set has them."""
    part = stream.evaluate[task].test.resident()
    columns = columns_among(stream.evaluate, result.run.scenario, len(stream.tasks), task)
    with torch.no_grad():
        logits = result.model(task)(part.x)
    assert logits.shape == (len(part), len(columns))
    return float((logits.argmax(1) + columns.start == part.y).double().mean())


def test_task_names_that_repeat_in_an_old_record_are_not_guessed(tasks_npz: str) -> None:
    result = whole(tasks_npz, "packnet")
    assert result.data is not None
    old, _, new = result.data.tasks
    same = dataclasses.replace(result, data=dataclasses.replace(result.data, tasks=(old, old, new)))
    with pytest.raises(ValueError, match=rf"has 2 tasks named '{old.name}': 0, 1, from 0; give a number"):
        same.model(old.name)
    assert same.model(new.name).classes == new.classes
    with pytest.raises(ValueError, match=r"has no task 'dusk'; its tasks, from 0: 0 \(task 0\), 1 \(task 1\), 2 \(task 2\)"):
        result.model("dusk")


def check(run: Run, result: Result | None = None) -> None:
    result = selfless.train(run) if result is None else result
    (stream,) = build_streams([run], None)
    found = [accuracy(result, stream, task) for task in range(len(stream.evaluate))]
    assert found == result.accuracy[-1].tolist()


@pytest.mark.parametrize("name", sorted(set(PRESERVERS) - {"finetune"}))
@pytest.mark.slow
def test_the_network_has_the_recorded_accuracy(name: str, tasks_npz: str) -> None:
    result = whole(tasks_npz, {"ebll": "ebll:1,steps=10"}.get(name, name))
    check(result.run, result)


@pytest.mark.parametrize(
    "changes",
    [
        {"preserve": "lwf:1+mas:0.1"},
        {"preserve": "imm:1e-3,merge=mean,drop=0.3"},
        {"scenario": "class"},
        {"scenario": "domain"},
        {"stream_options": {"mean": [0.3], "std": [0.2]}},
        {"preserve": "packnet", "tasks": 1},
        {"preserve": "hat", "model": "cnn-8", "model_options": {"padding": "same"}, "stream_options": {"limit": 20}},
    ],
    ids=str,
)
@pytest.mark.slow
def test_sums_scenarios_and_options(changes: dict[str, Any], tasks_npz: str) -> None:
    with (
        pytest.warns(UserWarning, match="no loss compares old classes") if changes.get("scenario") == "class" else contextlib.nullcontext()
    ):
        check(Run(**({"stream": tasks_npz, "preserve": "mas"} | BASE | changes)))


def test_a_recorded_network_is_loaded(tasks_npz: str, tmp_path: Path) -> None:
    run = Run(stream=tasks_npz, preserve="packnet", **BASE)
    trained = selfless.train([run, dataclasses.replace(run, seed=1)], out=tmp_path, workers=1)[0]
    loaded = selfless.load(tmp_path / run.key)
    check(run, loaded)
    x = torch.randint(0, 256, (4, 1, 6, 6), dtype=torch.uint8)
    model = selfless.load(tmp_path, run.key).model(task=1)
    assert not model.training
    assert torch.equal(model(x), trained.model(task="task 1")(x))
    assert model.classes == trained.data.tasks[1].classes  # type: ignore[union-attr]
    torch.testing.assert_close(model(x), model(x.float() / 255))  # floats are 0 … 1, as elsewhere in torch


def test_what_cannot_be_loaded_is_said(tasks_npz: str, tmp_path: Path) -> None:
    run = Run(stream=tasks_npz, **BASE)
    result = selfless.train(run, out=tmp_path, checkpoints=False)
    with pytest.raises(ValueError, match=r"has no recorded weights.*--force"):
        result.model()
    with pytest.raises(ValueError, match=f"has no run 'abc'; its newest runs: {run.key}"):
        selfless.load(tmp_path / "abc")
    with pytest.raises(ValueError, match="holds 1 runs; name one"):
        selfless.load(tmp_path)
    archive = Store(tmp_path).pack(remove=True)
    assert selfless.load(tmp_path / run.key).average == selfless.load(archive / run.key).average == result.average
    with pytest.raises(ValueError, match="packed results"):
        selfless.load(archive, run.key).model()


def test_wrong_tasks_and_images_are_said(tasks_npz: str) -> None:
    result = whole(tasks_npz, "mas")
    with pytest.raises(ValueError, match=r"has no task 3; its tasks, from 0: 0 \(task 0\), 1 \(task 1\), 2 \(task 2\)"):
        result.model(3)
    with pytest.raises(ValueError, match=r"takes images \(n, 1, 6, 6\) of uint8 .* not \(1, 6, 6\) uint8"):
        result.model()(torch.zeros(1, 6, 6, dtype=torch.uint8))
