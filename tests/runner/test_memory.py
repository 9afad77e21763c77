"""Fleets that do not fit into memory, or whose members cannot train together."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from numpy.testing import assert_array_equal

import selfless
from selfless import Run
from selfless.engine.learner import Learner
from selfless.runner import TrainOptions, memory
from selfless.runner.plan import fleets
from tests.runner.small_runs import BASE


@pytest.mark.slow
def test_a_fleet_is_cut_to_what_fits(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [Run(stream=tasks_npz, **(BASE | {"epochs": 1, "lr": 0.01 * (i + 1)})) for i in range(12)]
    sizes: list[int] = []
    monkeypatch.setattr(memory, "available", lambda device: 1_000_000)
    monkeypatch.setattr(memory, "step_bytes", lambda runs, make, device: 300_000 + 100_000 * len(runs))
    assert memory.most(runs, lambda runs: Learner(runs), "cpu") == 5  # 400,000 for one, 100,000 for each other, 80 % of the memory
    trained = selfless.train(runs, out=tmp_path, workers=1, watch=lambda fleet, event: sizes.append(len(fleet)))
    assert set(sizes) == {5, 2}
    assert [r.run for r in trained] == runs
    monkeypatch.setattr(memory, "available", lambda device: 100_000_000)
    assert memory.most(runs, lambda runs: Learner(runs), "cpu") == 12


@pytest.mark.slow
def test_rehearsing_measures_a_step(tasks_npz: str) -> None:
    runs = [Run(stream=tasks_npz, model="mlp-2048", batch=50, lr=lr) for lr in (0.01, 0.02)]
    parameters = sum(p.numel() for p in Learner(runs[:1]).fleet.params.values())
    one, two = (memory.step_bytes(runs[:n], Learner, "cpu") for n in (1, 2))
    assert two - one > 2 * 4 * parameters  # the other's parameters and momentum, at least
    assert one < two < 2.5 * one


@pytest.mark.slow
def test_a_fleet_too_large_for_the_memory_is_halved(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [Run(stream=tasks_npz, **(BASE | {"epochs": 1, "lr": 0.01 * (i + 1)})) for i in range(5)]
    learn = Learner.learn

    def limited(self: Learner) -> Any:
        if len(self.runs) > limit:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] … DefaultCPUAllocator: can't allocate memory")
        return learn(self)

    monkeypatch.setattr(Learner, "learn", limited)
    limit = 2
    results = selfless.train(runs, out=tmp_path, workers=1)
    assert [r.run for r in results] == runs
    assert {r.about["fleet"] for r in results} == {1, 2}
    assert not list(tmp_path.glob("*/training-*"))
    limit = 0
    with pytest.raises(ValueError, match=r"one run of mlp-\d+ at batch \d+ does not fit into the memory of cpu .* smaller --batch"):
        selfless.train(dataclasses.replace(runs[0], seed=9), out=tmp_path)


def test_convolutions_train_one_by_one_on_a_cpu() -> None:
    runs = [Run(stream="split-cifar-100", model="cnn-16", seed=s) for s in range(3)]
    assert [len(f) for f in fleets(runs)] == [3]
    assert [len(f) for f in memory.parts_that_fit(runs, TrainOptions(device="cpu"), processes=1)] == [1, 1, 1]


ODD = """
import torch
from torch import nn
class Stops(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, outputs))
    def forward(self, x):
        return self.body(x) if x.sum() > -1e9 else self.body(-x)
def control(outputs, input_shape):
    return Stops(outputs)
"""


@pytest.mark.slow
def test_a_network_that_cannot_share_a_fleet_trains_alone(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loners.py").write_text(ODD)
    monkeypatch.chdir(tmp_path)
    runs = [Run(stream=tasks_npz, **(BASE | {"model": "loners:control", "lr": lr})) for lr in (0.05, 0.06, 0.07)]
    with pytest.warns(UserWarning, match=r"loners:control .* its runs train one by one"):
        together = selfless.train(runs, workers=1)
    assert {r.about["fleet"] for r in together} == {1}
    assert_array_equal(together[1].accuracy, selfless.train(runs[1]).accuracy)
    with pytest.raises(ValueError, match=r"loners:control .* its runs train one by one"):
        Learner(runs)
    monkeypatch.setattr(memory, "available", lambda device: 1_000_000)  # too little for many: then they are rehearsed by two
    assert memory.most([dataclasses.replace(runs[0], lr=0.01 * i) for i in range(20)], Learner, "cpu") == 1
