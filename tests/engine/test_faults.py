"""A fault is planted in one member of a fleet: its place is found, and nothing changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from selfless import SI, SLNID, DeCov, NoSparsifier
from selfless.engine.faults import loss_fault, state_faults
from selfless.engine.fleet import Fleet
from selfless.engine.learner import Learner
from selfless.sparsify import Sparsifier
from tests.engine.small_runs import small


@dataclass(frozen=True)
class Exploding(Sparsifier):
    """A method of one's own whose penalty is not finite."""

    strength: float = 1.0

    def penalty(self, x: torch.Tensor, alpha: torch.Tensor | None = None) -> torch.Tensor:
        return x.sum() * math.inf


def first_task(data: str, **changes: Any) -> Fleet:
    """A fleet of two members at the start of its first task."""
    learner = Learner([small(data, seed=seed, **changes) for seed in (0, 1)])
    task = learner.streams[0].tasks[0]
    learner.fleet.begin_task(learner.load([s.tasks[0].train for s in learner.streams]), task.heads, learner.streams[0].outputs)
    return learner.fleet


def trained(fleet: Fleet) -> str:
    """Train an epoch; return the fault of the second member. The first is sound."""
    loss, _ = fleet.train_epoch(0, 0)
    assert math.isfinite(loss[0])
    assert not math.isfinite(loss[1])
    after = [t.clone() for t in fleet.changing()]
    found = loss_fault(fleet, 1, 0, 0, "task 1 (a)")
    for tensor, wanted in zip(fleet.changing(), after, strict=True):  # to look at a fault changes nothing
        assert_close(tensor, wanted, rtol=0, atol=0, equal_nan=True)
    return found


@pytest.mark.parametrize("sparsify", [NoSparsifier(), SLNID(1e-2)])
@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("fc1.bias", math.nan, "1 of 3 on, first in 'fc1.bias' before this epoch; use a learning rate below 0.05"),
        ("fc1.weight", 3e38, "1 of 3 on, first in the output of layer 'fc1'; use"),
        ("fc2.bias", 3e38, "1 of 3 on, first in the output of layer 'head'; use"),
    ],
)
def test_the_layer_is_named(tasks_npz: str, sparsify: Any, name: str, value: float, place: str) -> None:
    fleet = first_task(tasks_npz, sparsify=sparsify)
    with torch.no_grad():
        fleet.params[name][1] = value
    assert f"the loss was not finite in epoch 1 of task 1 (a), from step {place}" in trained(fleet)


def test_a_gradient_names_the_layer_where_it_began(tasks_npz: str) -> None:
    """DeCov reads the hidden layers alone: its infinite gradient does not reach the head."""
    fleet = first_task(tasks_npz, sparsify=DeCov(1e12))
    fleet.rates.lr_lambda[0][0] = 0.0
    fleet.train_epoch(0, 0)
    assert "from step 3 of 3 on, first in 'fc2.bias' after step 2; use" in loss_fault(fleet, 1, 0, 0, "task 1 (a)")


def test_the_data_is_named(tasks_npz: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = first_task(tasks_npz)
    batch = fleet.step.batch

    def spoilt(size: int) -> Any:
        x, y = batch(size)
        x[1, 0] = math.inf
        return x, y

    monkeypatch.setattr(fleet.step, "batch", spoilt)
    assert "from step 1 of 3 on, first in the data; use" in trained(fleet)


@pytest.mark.parametrize("changes", [{}, {"preserve": SI(0.1)}, {"optimizer": "adam", "schedule": "cosine"}, {"augment": "crop-flip"}])
def test_rewound_steps_are_those_of_the_epoch(tasks_npz: str, changes: dict[str, Any]) -> None:
    fleet = first_task(tasks_npz, **changes)
    fleet.train_epoch(0, 0)
    sums, after = fleet.loss_sums.clone(), [t.clone() for t in fleet.changing()]
    for steps in (3, 1):
        with fleet.rewound(0, 0, steps):
            assert_close(fleet.step.loss_sum, sums[steps - 1], rtol=0, atol=0)
    with fleet.rewound(0, 0, 3):
        for tensor, wanted in zip(fleet.changing(), after, strict=True):
            assert_close(tensor, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("changes", [{}, {"optimizer": "adam"}, {"preserve": SI(0.1)}, {"schedule": "cosine"}])
def test_the_last_good_state_is_kept(tasks_npz: str, changes: dict[str, Any]) -> None:
    """Each task of a member explodes in its first epoch, so its network is never changed; beside it another one is trained."""
    learner = Learner([small(tasks_npz, lr=lr, sparsify=NoSparsifier(), **changes) for lr in (0.05, 1e30)])
    before = {name: p.detach().clone() for name, p in learner.fleet.params.items()}
    good, bad = learner.learn()
    assert (good.status, bad.status) == ("done", "failed")
    assert "in epoch 1 of task 1 (" in bad.error
    for name, p in learner.fleet.params.items():
        assert_close(p[1], before[name][1], rtol=0, atol=0)
        assert not torch.equal(p[0], before[name][0])
    assert all(bool(torch.isfinite(t).all()) for t in learner.member_tensors(1).values() if t.is_floating_point())


def test_what_is_not_finite_after_a_task_is_named(tasks_npz: str) -> None:
    fleet = first_task(tasks_npz)
    fleet.train_epoch(0, 0)
    fleet.consolidate()
    assert state_faults(fleet, "task 1") == {}
    with torch.no_grad():
        fleet.params["head.bias"][0, 0] = math.nan
        fleet.state["omega"]["fc1.weight"][1] = math.inf
        fleet.alpha["act1"][1] = math.inf
    remedy = "use a learning rate below 0.05 or a smaller strength than slnid:0.01"
    assert state_faults(fleet, "task 1") == {
        m: f"parameters or importances were not finite after task 1: {names}; {remedy}"
        for m, names in enumerate(["head.bias", "the importance of fc1.weight, α of act1"])
    }


def test_negative_importances_are_a_fault_of_their_member(tasks_npz: str) -> None:
    fleet = first_task(tasks_npz)
    fleet.train_epoch(0, 0)
    fleet.consolidate()
    fleet.state["omega"]["fc1.weight"][1, 0, 0] = -1e-3
    (fault,) = state_faults(fleet, "task 1").items()
    assert fault[0] == 1
    assert "importances were negative after task 1: the importance of fc1.weight; return values that are not" in fault[1]


def test_a_method_of_ones_own_is_looked_at_before_the_learning_rate(tasks_npz: str) -> None:
    fleet = first_task(tasks_npz, sparsify=Exploding(1.0))
    fleet.train_epoch(0, 0)
    assert loss_fault(fleet, 1, 0, 0, "task 1 (a)").endswith(
        "; look at what tests.engine.test_faults:Exploding computes (selfless check), or use a learning rate "
        "below 0.05 or a smaller strength than tests.engine.test_faults:Exploding:1"
    )


def test_a_layer_without_importance_between_others_is_a_fault_of_the_device(tasks_npz: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from selfless.engine.native import functions

    right = functions.StackedLinear.backward

    def backward(ctx: Any, g: Any) -> Any:
        dx, dw, *rest = right(ctx, g)
        is_second = ctx.measure is not None and dw is not None and dw.shape[1:] == (12, 12)
        return dx, torch.zeros_like(dw) if is_second else dw, *rest

    monkeypatch.setattr(functions.StackedLinear, "backward", staticmethod(backward))
    with pytest.raises(RuntimeError, match=r"the importance of fc2\.weight is 0 in every entry, but not that of a layer before"):
        Learner([small(tasks_npz, epochs=1)]).learn()


def test_a_dead_network_has_no_importance_and_no_fault(tasks_npz: str) -> None:
    fleet = first_task(tasks_npz)
    with torch.no_grad():
        fleet.params["fc2.weight"].zero_()
        fleet.params["fc2.bias"].fill_(-1.0)
    fleet.consolidate()
    assert not fleet.state["omega"]["fc1.weight"].any()
