"""A learner: selection, schedules, ramps, held-out data, precision, runs that fail."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from selfless import (
    HAT,
    SLNID,
    L1Rep,
    L2Param,
    NoPreserver,
    NoSparsifier,
    PackNet,
    Run,
)
from selfless.data import stream
from selfless.engine.faults import state_faults
from selfless.engine.learner import Learner
from selfless.models import build
from selfless.spec import Result
from tests.engine.small_runs import small


def test_learning_happens(tasks_npz: str) -> None:
    result = Learner([small(tasks_npz, epochs=6)]).learn()[0]
    assert result.accuracy.shape == (3, 3)
    assert np.diag(result.accuracy).min() > 0.85
    assert 0.2 < result.baseline.mean() < 0.8
    assert result.history[2][-1]["loss"] < result.history[2][0]["loss"]
    assert result.summary()["average"] == pytest.approx(result.accuracy[-1].mean())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_precision_is_the_runs_own(tasks_npz: str, precision: Any) -> None:
    """bf16 products where the CPU has them, and afterwards everything as it was; float32 stays float32 whatever was set before."""
    seen: list[str] = []
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        run = small(tasks_npz, epochs=6, precision=precision)
        result = Learner([run], report=lambda event: seen.append(torch.get_float32_matmul_precision())).learn()[0]
        assert set(seen) == {"medium" if precision == "bf16" else "highest"}
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert result.accuracy.diagonal().min() > 0.8


def test_joint_training_and_shared_heads(tasks_npz: str) -> None:
    run = small(f"joint-{tasks_npz}", preserve=NoPreserver(), sparsify=NoSparsifier(), epochs=20)
    result = Learner([run]).learn()[0]
    assert result.accuracy.shape == (1, 3)
    assert result.accuracy.min() > 0.85


def test_selection_keeps_the_best_epoch(tasks_npz: str) -> None:
    for select, part in (("held-out", "held_out"), ("best-on-test", "test")):
        run = small(tasks_npz, select=select, epochs=5, lr=0.2, sparsify=NoSparsifier(), preserve=NoPreserver(), tasks=1)
        assert run.held_out == (0.1 if select == "held-out" else 0.0)
        result = Learner([run]).learn()[0]
        scores = [epoch[part] for epoch in result.history[0]]
        if select == "best-on-test":
            assert result.accuracy[0, 0] == pytest.approx(max(scores))
        assert len(scores) == 5


def test_what_was_kept_aside_is_judged_after_every_task(tasks_npz: str) -> None:
    """held_out[t, u] against the trained network itself, and against the scores of the epochs; absent where nothing was kept aside."""
    learner = Learner([small(tasks_npz, held_out=0.2, seed=s) for s in range(2)])
    for m, result in enumerate(learner.learn()):
        assert result.held_out is not None
        assert result.held_out.shape == (3, 3)
        assert_allclose(result.held_out.diagonal(), [task[-1]["held_out"] for task in result.history])
        tasks = stream(tasks_npz, seed=m, held_out=0.2).tasks
        model = build("mlp-12", outputs=6, input_shape=(1, 6, 6))
        model.load_state_dict({n: p[m] for n, p in learner.fleet.params.items()})
        for u, task in enumerate(tasks):
            assert task.held_out is not None
            x, y = task.held_out.resident().batch(torch.arange(len(task.held_out)))
            hits = model(x)[:, 2 * u : 2 * u + 2].argmax(1) == y - 2 * u
            assert result.held_out[-1, u] == pytest.approx(hits.double().mean().item())
        again = Result.from_dict(json.loads(json.dumps(result.as_dict())))
        assert again.held_out is not None
        assert_array_equal(again.held_out, result.held_out)
        older = {k: v for k, v in result.as_dict().items() if k != "held_out"}
        assert Result.from_dict(older).held_out is None
    assert Learner([small(tasks_npz, tasks=1)]).learn()[0].held_out is None
    joint = Learner([small(f"joint-{tasks_npz}", held_out=0.2, preserve=NoPreserver(), sparsify=NoSparsifier())]).learn()[0]
    assert joint.held_out is not None
    assert joint.held_out.shape == (1, 3)


def test_schedules(tasks_npz: str) -> None:
    cosine = Learner([small(tasks_npz, schedule="cosine", epochs=3, tasks=1)])
    cosine.learn()
    assert cosine.fleet.lr.item() < 0.05 * 0.2
    constant, step = (Learner([small(tasks_npz, schedule=schedule, epochs=10, tasks=1)]) for schedule in ("constant", "step"))
    (kept,), (dropped,) = (learner.learn()[0].history for learner in (constant, step))
    losses = [[epoch["loss"] for epoch in history] for history in (kept, dropped)]
    assert losses[0][:9] == pytest.approx(losses[1][:9], rel=1e-4)
    assert losses[0][9] != pytest.approx(losses[1][9], rel=1e-3)
    assert step.fleet.lr.item() == pytest.approx(0.1 * constant.fleet.lr.item())
    short, single = (Learner([small(tasks_npz, schedule="step", epochs=epochs, tasks=1)]) for epochs in (2, 1))
    short.learn()
    single.learn()
    assert short.fleet.lr.item() == pytest.approx(step.fleet.lr.item())
    assert single.fleet.lr.item() == constant.fleet.lr.item()  # the first epoch has the whole rate
    plateau = Learner([small(tasks_npz, schedule="plateau", epochs=40, tasks=1, lr=0.3)])
    result = plateau.learn()[0]
    assert len(result.history[0]) < 40  # stopped after ten stalled epochs
    assert plateau.fleet.lr.item() == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preserve", "sparsify", "head"),
    [
        (PackNet(0.6), NoSparsifier(), "own"),
        (PackNet(0.6), SLNID(1e-3), "shared"),
        (PackNet(0.6), L2Param(1e-3), "own"),
        (HAT(0.1, s_max=50.0), NoSparsifier(), "shared"),
        (HAT(0.1, s_max=50.0), SLNID(1e-3), "own"),
        (HAT(0.1, s_max=50.0), L2Param(1e-3), "shared"),
    ],
    ids=str,
)
def test_packnet_and_hat_lose_nothing_of_old_tasks(tasks_npz: str, preserve: Any, sparsify: Any, head: str) -> None:
    """Accuracy on a task never changes after it was learnt, in a fleet, with weight decay, own heads and shared; capacity only falls."""
    more: dict[str, Any] = {"epochs": 6, "batch": 20, "weight_decay": 1e-3, "model": "mlp-24", "stream_options": {"head": head}}
    runs = [small(tasks_npz, preserve=preserve, sparsify=sparsify, seed=s, **more) for s in range(2)]
    for result in Learner(runs).learn():
        for u in range(3):
            assert (result.accuracy[u:, u] == result.accuracy[u, u]).all()
        assert result.summary()["backward_transfer"] == 0.0
        free = [c["free_parameters"] for c in result.capacity]
        assert free[0] >= free[1] >= free[2] >= 0
        assert 1 > free[0] > free[2]
        assert result.accuracy.diagonal().mean() > (0.7 if head == "own" else 0.3)  # one head, other classes: few steps for that


def test_a_run_that_blows_up_in_its_last_step_has_failed(tasks_npz: str) -> None:
    result = Learner([small(tasks_npz, tasks=1, epochs=1, batch=130, lr=1e18)]).learn()[0]
    assert result.status == "failed"
    assert "not finite after task 1" in result.error
    assert result.error.partition("): ")[2].startswith(("all parameters;", "the importance of ", "α of "))


def test_a_fault_names_the_tensors_of_its_member(tasks_npz: str) -> None:
    fleet = Learner([small(tasks_npz, seed=s) for s in range(3)]).fleet
    assert state_faults(fleet, "task 1") == {}
    name = list(fleet.params)[1]
    with torch.no_grad():
        fleet.params[name][1, 0] = torch.inf
    assert list(found := state_faults(fleet, "task 1")) == [1]
    assert found[1].startswith(f"parameters or importances were not finite after task 1: {name}; use ")


@pytest.mark.slow
@pytest.mark.parametrize(("sparsify", "schedule"), [(SLNID(0.05), "cosine"), (L1Rep(0.05), "constant")], ids=str)
def test_a_ramp_begins_at_nothing_and_ends_at_the_strength(
    tasks_npz: str, monkeypatch: pytest.MonkeyPatch, sparsify: Any, schedule: str
) -> None:
    """Over two epochs of three λ is 0, λ/2, λ, in every task; members have each their own."""
    at_once = small(tasks_npz, sparsify=sparsify, epochs=3, schedule=schedule)
    learner = Learner([dataclasses.replace(at_once, ramp=2), at_once])
    fleet, begin = learner.fleet, learner.fleet.begin_epoch
    seen: list[tuple[list[float], list[float]]] = []

    def watched(task: int, epoch: int) -> None:
        begin(task, epoch)
        seen.append((fleet.rates.sparsify[0].tolist(), fleet.rates.lr_lambda[0].tolist()))

    monkeypatch.setattr(fleet, "begin_epoch", watched)
    together = learner.learn()
    strength = sparsify.strength
    for t in range(3):
        assert_allclose([now[0] for now, _ in seen[3 * t : 3 * t + 3]], [0.0, strength / 2, strength], rtol=1e-6)
        assert_allclose([now[1] for now, _ in seen[3 * t : 3 * t + 3]], strength, rtol=1e-6)
        assert seen[3 * t][1][0] == 0.0
    for m, run in enumerate(learner.runs):
        assert_allclose(Learner([run]).learn()[0].accuracy, together[m].accuracy, atol=0.026)


def test_a_ramp_is_part_of_a_run_that_has_one(tasks_npz: str) -> None:
    plain = small(tasks_npz)
    assert "ramp" not in plain.as_dict()
    assert plain.key == small(tasks_npz, ramp=0).key != small(tasks_npz, ramp=1).key
    assert Run.from_dict(small(tasks_npz, ramp=1).as_dict()) == small(tasks_npz, ramp=1)
    for wrong in (-1, 0.5, True):
        with pytest.raises(ValueError, match=r"ramp is .*; it must be a whole number ≥ 0"):
            small(tasks_npz, ramp=wrong)
    with pytest.raises(ValueError, match="ramp is 2 of 2 epochs"):
        small(tasks_npz, epochs=2, ramp=2)
