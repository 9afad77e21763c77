"""A finished run goes on with new tasks: the same network as in one run, without the old data."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import selfless
from selfless import Result, Run
from selfless.engine.continuing import distinct_names
from selfless.functional import scale
from selfless.trained import read_tensors
from tests.runner.small_runs import stopping
from tests.whole_runs import BASE, whole

pytestmark = pytest.mark.usefixtures("every_epoch_saved")

SLOW = ["mas-local", "ewc-online", "rwalk", "ebll:1,steps=10", "imm", "none", "sgp:0.8,samples=30", "lwf:1+mas:0.1"]
PRESERVERS = ["mas", "ewc", "si", "lwf", "packnet", "hat", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.fixture
def parts(tasks_npz: str, tmp_path: Path) -> list[str]:
    """The stream of three tasks as two streams: the first two tasks, and the third."""
    whole = np.load(tasks_npz.removeprefix("arrays:"))
    for name, wanted in (("first", (0, 1)), ("third", (2,))):
        chosen = {
            key: array[np.isin(whole["task" if key in ("x_train", "y_train", "task") else "task_test"], wanted)]
            for key, array in whole.items()
        }
        np.savez(tmp_path / f"{name}.npz", **chosen)
    return [f"arrays:{tmp_path}/{name}.npz" for name in ("first", "third")]


def assert_same_network(one: Result, other: Result) -> None:
    a, b = read_tensors(one), read_tensors(other)
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert different == []


@pytest.mark.parametrize("preserve", PRESERVERS)
@pytest.mark.slow
def test_two_tasks_and_then_a_third_give_the_bits_of_one_run(preserve: str, tasks_npz: str, parts: list[str], tmp_path: Path) -> None:
    one = whole(tasks_npz, preserve)
    first = selfless.train(Run(stream=parts[0], preserve=preserve, outputs=6, **BASE), out=tmp_path)
    both = selfless.train(first.continued(parts[1]), out=tmp_path)
    assert_same_network(one, both)
    assert both.data == one.data
    known = ~np.isnan(both.accuracy)  # the first task was not evaluated on the third
    assert known.sum() == 8
    assert np.array_equal(both.accuracy[known], one.accuracy[known])
    assert both.summary() == one.summary()
    assert (both.history, both.capacity) == (one.history, one.capacity)


@pytest.mark.parametrize("changes", [{"scenario": "class"}, {"weight_decay": 1e-3, "schedule": "cosine", "optimizer": "adam"}], ids=str)
def test_other_settings_go_on_to_the_bit(changes: dict[str, Any], tasks_npz: str, parts: list[str], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about MAS in the class scenario
        one = selfless.train(Run(stream=tasks_npz, **BASE, **changes))
        first = selfless.train(Run(stream=parts[0], outputs=6, **BASE, **changes), out=tmp_path)
        assert_same_network(one, selfless.train(first.continued(parts[1]), out=tmp_path))


@pytest.mark.slow
def test_measured_strengths_go_on_to_the_bit(tasks_npz: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "FIRST_LOOK", 2.0)
    terms = {"preserve": "mas:auto", "sparsify": "slnid:auto"}
    one = selfless.train(Run(stream=tasks_npz, **{**BASE, **terms}))
    first = selfless.train(Run(stream=parts[0], outputs=6, **{**BASE, **terms}), out=tmp_path)
    both = selfless.train(first.continued(parts[1]), out=tmp_path)
    assert_same_network(one, both)
    assert first.about["strengths"] == both.about["strengths"] == one.about["strengths"]
    number = selfless.train(first.continued(parts[1], preserve="mas:0.5", sparsify="slnid:0.01"), out=tmp_path)
    assert "strengths" not in number.about


def test_strengths_are_measured_after_a_run_with_numbers(parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """λ_Ω from Ω of the finished run, before the first new task; λ from R of the first new task."""
    monkeypatch.setattr(scale, "FIRST_LOOK", 2.0)
    first = selfless.train(Run(stream=parts[0], outputs=6, **{**BASE, "preserve": "mas:0.1", "sparsify": "slnid:0.001"}), out=tmp_path)
    both = selfless.train(first.continued(parts[1], preserve="mas:auto", sparsify="slnid:auto"), out=tmp_path)
    old = read_tensors(first)
    size = sum((t * old[n.replace("omega", "anchor")] ** 2).sum() for n, t in old.items() if n.startswith("state.omega."))
    assert both.about["strengths"]["mas"] == pytest.approx(selfless.MAS.auto_share / float(size), rel=1e-4)
    assert both.about["strengths"]["slnid"] > 0


@pytest.mark.parametrize("changes", [{"scenario": "domain"}, {"stream_options": {"head": "shared"}}], ids=str)
def test_tasks_that_share_their_outputs_go_on_to_the_bit(changes: dict[str, Any], tasks_npz: str, tmp_path: Path) -> None:
    """Tasks of one head need no further outputs, so the law holds without `outputs`."""
    whole = dict(np.load(tasks_npz.removeprefix("arrays:")))
    whole |= {key: whole[key] % 2 for key in ("y_train", "y_test")}
    for name, wanted in (("whole", (0, 1, 2)), ("first", (0, 1)), ("third", (2,))):
        rows = {half: np.isin(whole[key], wanted) for half, key in (("train", "task"), ("test", "task_test"))}
        chosen = {key: array[rows["test" if key.endswith("test") else "train"]] for key, array in whole.items()}
        np.savez(tmp_path / f"{name}.npz", **chosen)
    one = selfless.train(Run(stream=f"arrays:{tmp_path}/whole.npz", **BASE, **changes))
    first = selfless.train(Run(stream=f"arrays:{tmp_path}/first.npz", **BASE, **changes), out=tmp_path)
    more = {key: value for key, value in changes.items() if key == "stream_options"}
    both = selfless.train(first.continued(f"arrays:{tmp_path}/third.npz", **more), out=tmp_path)
    assert_same_network(one, both)
    assert both.data == one.data


ZERO_HEAD = """from torch import nn
def build(outputs, input_shape):
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, outputs))
    for parameter in net[3].parameters():
        nn.init.zeros_(parameter)
    return net
"""


@pytest.mark.parametrize(
    "preserve", ["mas", "packnet", "hat", *(pytest.param(name, marks=pytest.mark.slow) for name in ("si", "imm", "lwf"))]
)
@pytest.mark.slow
def test_outputs_that_are_added_later(
    preserve: str, tasks_npz: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With heads that start at zero, added outputs differ from those of one run only in rounding."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero_head.py").write_text(ZERO_HEAD)
    settings = {**BASE, "model": "zero_head:build", "preserve": preserve}
    one = selfless.train(Run(stream=tasks_npz, **settings), workers=1)
    first = selfless.train(Run(stream=parts[0], **settings), out=tmp_path)
    assert first.data is not None
    assert first.data.outputs == 4
    both = selfless.train(first.continued(parts[1]), out=tmp_path)
    for name, tensor in read_tensors(one).items():
        torch.testing.assert_close(read_tensors(both)[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_without_the_old_data_old_accuracies_are_unknown(parts: list[str], tmp_path: Path) -> None:
    first = selfless.train(Run(stream=parts[0], **BASE), out=tmp_path)
    seen = selfless.train(first.continued(parts[1]), out=tmp_path)
    Path(parts[0].removeprefix("arrays:")).unlink()
    unseen = selfless.train(first.continued(parts[1]), out=tmp_path, force=True)
    assert_same_network(seen, unseen)
    assert np.isnan(unseen.accuracy[-1]).tolist() == [True, True, False]
    assert unseen.accuracy[-1, 2] == seen.accuracy[-1, 2]
    assert np.array_equal(unseen.accuracy[:2, :2], first.accuracy)  # what the first run recorded
    assert np.isnan(unseen.average)
    assert unseen.summary()["learning_accuracy"] == seen.summary()["learning_accuracy"]
    assert unseen.about["notes"] == ["accuracy on task 0, task 1 is unknown: the data of old tasks were not found"]
    recorded = json.loads((tmp_path / unseen.run.key / "metrics.json").read_text())
    assert recorded["accuracy"][-1][:2] == [None, None]
    assert recorded["run"]["parent"].startswith(first.run.key)
    assert selfless.load(tmp_path / unseen.run.key).model(task=0)(torch.zeros(1, 1, 6, 6)).shape == (1, 2)


def test_a_continued_run_is_continued(tasks_npz: str, parts: list[str], tmp_path: Path) -> None:
    one = selfless.train(Run(stream=parts[0], **BASE), out=tmp_path)
    two = selfless.train(one.continued(parts[1]), out=tmp_path)
    three = selfless.train(two.continued(tasks_npz, tasks=1, epochs=1), out=tmp_path)
    assert three.data is not None
    assert [task.columns for task in three.data.tasks] == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert [len(epochs) for epochs in three.history] == [2, 2, 2, 1]
    assert not np.isnan(three.accuracy[-1]).any()  # the data of all runs are found
    assert np.array_equal(np.nan_to_num(three.accuracy[:3, :3]), np.nan_to_num(two.accuracy))


@pytest.mark.slow
def test_several_continue_at_once_and_an_interruption_changes_nothing(parts: list[str], tmp_path: Path) -> None:
    first = selfless.train(Run(stream=parts[0], **BASE), out=tmp_path)
    runs = [first.continued(parts[1], lr=lr) for lr in (0.05, 0.02)]
    together = selfless.train(runs, workers=1, parents=tmp_path)
    alone = [selfless.train(run, parents=tmp_path) for run in runs]
    for one, other in zip(together, alone, strict=True):
        for name, tensor in read_tensors(one).items():
            torch.testing.assert_close(tensor, read_tensors(other)[name], rtol=1e-4, atol=1e-5)
    with pytest.raises(KeyboardInterrupt):
        selfless.train(runs[0], out=tmp_path, watch=stopping(1))
    assert_same_network(selfless.train(runs[0], out=tmp_path), alone[0])


def test_what_cannot_go_on_is_said(parts: list[str], tmp_path: Path) -> None:
    first = selfless.train(Run(stream=parts[0], **BASE), out=tmp_path)
    with pytest.raises(ValueError, match=r"model is 'mlp-8', but run .* has 'mlp-12'"):
        selfless.train(first.continued(parts[1], model="mlp-8"), out=tmp_path)
    with pytest.raises(ValueError, match=r"preserve is ewc:10, but run .* has mas:0\.1"):
        selfless.train(first.continued(parts[1], preserve="ewc:10"), out=tmp_path)
    with pytest.raises(ValueError, match=r"has no run .* which is to be continued"):
        selfless.train(first.continued(parts[1]), out=tmp_path / "other")
    with pytest.raises(ValueError, match="need 6 output columns, and outputs is 5"):
        selfless.train(first.continued(parts[1], outputs=5), out=tmp_path)
    with pytest.raises(ValueError, match="is not recorded, so it cannot be continued"):
        whole(parts[0], "mas").continued(parts[1])
    with pytest.raises(ValueError, match=r"load\('DIR/KEY'\)\.continued"):
        Run(stream=parts[1], parent=f"{tmp_path}/{first.run.key}")
    digest = "0" * 12
    with pytest.raises(ValueError, match="was trained again since"):
        selfless.train(first.continued(parts[1], parent=f"{first.run.key}@{digest}"), out=tmp_path)
    wide = tmp_path / "wide.npz"
    third = dict(np.load(parts[1].removeprefix("arrays:")))
    np.savez(wide, **third | {name: np.concatenate([third[name]] * 2, 3) for name in ("x_train", "x_test")})
    with pytest.raises(ValueError, match=r"has images \(1, 6, 12\) uint8, but the network takes \(1, 6, 6\) uint8; convert them first"):
        selfless.train(first.continued(f"arrays:{wide}"), out=tmp_path)
    with pytest.raises(ValueError, match=r"has mean \(0\.3.*\), but the network was trained with .* and keeps it; leave mean out"):
        selfless.train(first.continued(parts[1], stream_options={"mean": [0.3], "std": [0.2]}), out=tmp_path)


def test_a_continued_run_has_no_two_tasks_of_one_name(tasks_npz: str, tmp_path: Path) -> None:
    first = selfless.train(Run(stream=tasks_npz, **BASE | {"epochs": 1}, tasks=2), out=tmp_path)
    both = selfless.train(first.continued(tasks_npz, tasks=1), out=tmp_path)
    assert both.data is not None
    assert [task.name for task in both.data.tasks] == both.about["tasks"] == ["task 0", "task 1", "task 2"]
    assert both.model("task 2").columns == range(4, 6)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (["task 1", "task 2"], ["task 1", "task 2", "task 3"], ["task 3", "task 4", "task 5"]),
        (["birds"], ["cars", "birds", "birds"], ["cars", "birds 2", "birds 3"]),
        (["2024"], ["2024", "2025"], ["2024 2", "2025"]),
        (["a"], ["b"], ["b"]),
    ],
)
def test_names_of_new_tasks(old: list[str], new: list[str], found: list[str]) -> None:
    assert distinct_names(old, new) == found
