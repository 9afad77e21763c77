"""Members whose preservers have the same step but consolidate in different ways, such as MAS and EWC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.torch import load_file
from torch.testing import assert_close

import selfless
from selfless import EWC, HAT, MAS, SLNID, DeCov, LwF, NoSparsifier, Run, SparingDeCov
from selfless.engine.kinds import join, kinds_of, take
from selfless.engine.learner import Learner
from selfless.preserve import OnlineEWC
from selfless.runner.plan import fleets
from selfless.testing import small_arrays
from tests.engine.small_runs import on_gpu, small
from tests.runner.small_runs import stopping

NETWORKS = """
from torch import nn

def plain(outputs, input_shape):
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, outputs))

def normed(outputs, input_shape):
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU(), nn.Flatten(),
                         nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, outputs))

class Bent(nn.Module):
    def __init__(self, outputs, input_shape):
        super().__init__()
        self.first, self.act1, self.second, self.act2 = nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()
        self.head = nn.Linear(8, outputs)

    def forward(self, x):
        h = self.act1(self.first(x.flatten(1)))
        return self.head(h + self.act2(self.second(h)))
"""
KINDS = [MAS(0.2), EWC(5.0, alpha="function"), MAS(0.1, estimator="per-batch"), EWC(3.0), OnlineEWC(4.0, decay=0.5), MAS(0.05)]


def mixed(data: str, preservers: Any = KINDS, **changes: Any) -> list[Run]:
    """Return one fleet with these preservers; every second member is inhibited, which reads α."""
    sparsifiers = [SLNID(2e-2), NoSparsifier()]
    runs = [
        small(data, **{"epochs": 1, "preserve": preserve, "sparsify": sparsifiers[i % 2], **changes})
        for i, preserve in enumerate(preservers)
    ]
    (fleet,) = fleets(runs)
    return fleet


def assert_members_are_runs_alone(runs: list[Run]) -> None:
    learner = Learner(runs)
    together = learner.learn()
    assert len(learner.fleet.kinds) > 1
    for m, run in enumerate(runs):
        one = Learner([run])
        alone = one.learn()[0]
        for name, p in one.fleet.params.items():
            assert_close(learner.fleet.params[name][m], p[0], rtol=1e-3, atol=1e-4)
        mine, its = learner.member_tensors(m), one.member_tensors(0)
        assert mine.keys() == its.keys()
        for name, value in its.items():
            if name.startswith(("state.", "alpha.")):
                assert_close(
                    mine[name],
                    value,
                    rtol=2e-2,
                    atol=1e-7 + 1e-3 * float(value.float().abs().max()),
                    msg=lambda text, n=name: f"{n}: {text}",
                )
        assert_allclose(together[m].accuracy, alone.accuracy, atol=0.026)
        for ours, theirs in zip(together[m].capacity, alone.capacity, strict=True):
            assert ours.keys() == theirs.keys()


def test_each_member_is_the_run_alone(tasks_npz: str) -> None:
    assert_members_are_runs_alone(mixed(tasks_npz))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"anchor": "explicit"},
        {"schedule": "cosine", "alpha": "mean"},
        {"optimizer": "adamw", "lr": 1e-3},
        {"preservers": [LwF(0.5) + MAS(0.1), LwF(0.5) + EWC(3.0), LwF(0.2) + MAS(0.2, estimator="per-batch")]},
        {"preservers": [HAT(0.75) + MAS(0.1), HAT(0.75) + EWC(1.0)], "epochs": 2},
        {"sparsify": DeCov(1e-2)},
        {"sparsify": SparingDeCov(1e-2)},
    ],
    ids=str,
)
def test_whatever_they_share(tasks_npz: str, changes: dict[str, Any]) -> None:
    assert_members_are_runs_alone(mixed(tasks_npz, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("network", ["plain", "normed", "Bent"])
def test_networks_that_are_measured_in_other_ways(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: str) -> None:
    """Convolutions; batch statistics, where a sample has no gradient of its own; a module that is mapped."""
    (tmp_path / "kindnets.py").write_text(NETWORKS)
    monkeypatch.chdir(tmp_path)
    by_batch = [MAS(0.1, estimator="per-batch"), EWC(3.0, estimator="per-batch"), MAS(0.2, estimator="per-batch")]
    preservers = by_batch if network == "normed" else KINDS[:4]
    assert_members_are_runs_alone(mixed(tasks_npz, preservers, model=f"kindnets:{network}", layers="all"))


@pytest.mark.slow
def test_importance_of_a_sample_of_the_task(tmp_path: Path) -> None:
    """A blurred task has weights by which its rows are drawn; every member draws its own."""
    arrays = {name: value for name, value in small_arrays().items() if not name.startswith("task")}
    np.savez(tmp_path / "all.npz", **arrays)  # type: ignore[arg-type]
    blurred = {"stream_options": {"kind": "blurred", "classes_per_task": 2}, "tasks": None, "seed": 0}
    assert_members_are_runs_alone(mixed(f"arrays:{tmp_path / 'all.npz'}", KINDS[:4], **blurred))


@pytest.mark.parametrize("events", [1, 3])  # within the first task; in the second, when the members have states
def test_a_stopped_fleet_goes_on_with_the_same_numbers(tasks_npz: str, tmp_path: Path, every_epoch_saved: None, events: int) -> None:
    runs, how = mixed(tasks_npz, epochs=2), {"workers": 1, "device": "cpu"}
    whole = selfless.train(runs, out=tmp_path / "whole", **how)
    with pytest.raises(KeyboardInterrupt):
        selfless.train(runs, out=tmp_path / "cut", watch=stopping(events), **how)
    again = selfless.train(runs, out=tmp_path / "cut", **how)
    for run, a, b in zip(runs, whole, again, strict=True):
        assert_array_equal(a.accuracy, b.accuracy)
        one, other = (load_file(tmp_path / place / run.key / "checkpoint.safetensors") for place in ("whole", "cut"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@on_gpu
@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, {"schedule": "cosine", "epochs": 2}], ids=str)
def test_a_gpu_computes_what_a_cpu_does(tasks_npz: str, changes: dict[str, Any]) -> None:
    runs = mixed(tasks_npz, **{"precision": "fp32", **changes})
    cpu, gpu = Learner(runs), Learner(runs, device="cuda")
    for a, b in zip(cpu.learn(), gpu.learn(), strict=True):
        assert_allclose(a.accuracy, b.accuracy, atol=0.051)


def test_each_preserver_is_warned_about_in_the_class_scenario(tasks_npz: str) -> None:
    with pytest.warns(UserWarning, match="the class scenario") as said:
        Learner(mixed(tasks_npz, [MAS(0.1), EWC(1.0)], scenario="class"))
    text = " ".join(str(one.message) for one in said)
    assert "MAS" in text
    assert "EWC" in text


def test_a_study_of_several_preservers_is_one_fleet(tasks_npz: str, tmp_path: Path) -> None:
    results = selfless.train(mixed(tasks_npz), out=tmp_path / "out", device="cpu", workers=1)
    assert [r.status for r in results] == ["done"] * len(KINDS)
    assert {r.about["fleet"] for r in results} == {len(KINDS)}


def test_kinds_are_neighbours_that_differ_in_more_than_their_strength() -> None:
    assert kinds_of([MAS(1.0), MAS(2.0), EWC(1.0)]) == [(MAS(1.0), slice(0, 2)), (EWC(1.0), slice(2, 3))]
    assert kinds_of([MAS(1.0)]) == [(MAS(1.0), slice(0, 1))]


def test_what_is_taken_apart_is_joined() -> None:
    tensors = {"a": torch.arange(6.0).view(3, 2), "b": torch.arange(3)}
    parts = [take(tensors, slice(0, 2)), take(tensors, slice(2, 3))]
    for name, value in join(parts).items():
        assert_close(value, tensors[name])
    assert join([{}, {}]) == {}
