"""Distillation in a loop: when its curvature is measured, what its strength is then, and batches with more than tensors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import EBLL, LwF
from selfless.functional import measures_curvature
from selfless.keeper.damping import Optimizers
from tests.keeper.nets import Net, batches, seeded
from tests.small_nets import rand


@pytest.mark.filterwarnings("ignore:.* has changed since task")  # weights are moved by hand
def test_the_strength_is_damped_by_a_curvature_that_is_measured_in_some_steps() -> None:
    """λ' = λ/(1 + step λ κ), with κ of the steps that `measures_curvature` names, counted from the start of each task."""
    model, plain = seeded(), seeded()
    keepers = [selfless.attach(model, LwF(3.0)), selfless.attach(plain, LwF(3.0, damped=False))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.75)
    for _ in range(2):
        plain.load_state_dict(model.state_dict())
        for keeper in keepers:
            keeper.consolidate(batches())
        with torch.no_grad():
            model.head.weight.mul_(3.0)  # so that the outputs differ from the teacher's
        keepers[0].anchor_with(optimizer)
        for k, (x, y) in enumerate(batches(1, count=8)):
            plain.load_state_dict(model.state_dict())
            before = float(keepers[0].state["curvature"]["largest"])
            cost = keepers[0].penalty((x, y))
            curvature = float(keepers[0].state["curvature"]["largest"])
            assert (curvature != before) == measures_curvature(k), k
            assert cost.item() == pytest.approx(keepers[1].penalty((x, y)).item() / (1 + 0.2 * 3.0 * curvature), rel=1e-4)
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + cost).backward()
            optimizer.step()


class Named(Net):
    """It also takes what is no tensor."""

    def forward(self, x: Tensor, labels: Tensor, name: str, factor: Tensor) -> Tensor:
        return super().forward(x) * factor


@pytest.mark.parametrize("preserve", [LwF(1.0), EBLL(1.0, steps=3, code=4)], ids=lambda term: term.name)
def test_a_batch_may_have_words_and_single_numbers(preserve: Any) -> None:
    model, factor = seeded(Named), torch.tensor(2.0)
    task = [{"x": x, "labels": y, "name": "first", "factor": factor} for x, y in batches(count=2)]
    keeper = selfless.attach(model, preserve)
    keeper.consolidate(task)
    assert keeper.penalty(task[0]).item() == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        model.fc1.weight.mul_(2.0)
    assert keeper.penalty(task[0]).item() > 1e-4


class Pixels(nn.Module):
    """Images (M, 6, 4, 4) → classes (M, 3, 4, 4), by a linear head for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_an_encoder_takes_maps_and_any_whole_numbers(dtype: torch.dtype) -> None:
    x, y = rand(5, 6, 4, 4), torch.arange(80).view(5, 4, 4) % 3
    keeper, rows = selfless.attach(seeded(Pixels), EBLL(1.0, steps=3, code=4)), selfless.attach(seeded(Net), EBLL(1.0, steps=3, code=4))
    for one, batch in ((keeper, (x, y.to(dtype))), (rows, (x.movedim(1, -1).flatten(0, -2), y.flatten()))):
        torch.manual_seed(0)  # of the encoder's start
        one.consolidate([batch])
    for name, value in keeper.states[0]["encoder"].items():
        assert_close(value, rows.states[0]["encoder"][name])
    assert keeper.penalty((x, y.to(dtype))).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("labels", [torch.randn(20), torch.rand(20), torch.randn(20, 3)], ids=["numbers", "shares", "rows"])
def test_an_encoder_refuses_labels_that_are_no_classes(labels: Tensor) -> None:
    keeper = selfless.attach(seeded(Net), EBLL(1.0, steps=3, code=4))
    with pytest.raises(ValueError, match=r"class numbers \(integers\), not torch.float32.*holds weights"):
        keeper.consolidate([(batches()[0][0], labels)])
    assert keeper.tasks == 0


@pytest.mark.parametrize("preserve", [LwF, EBLL])
def test_steps_that_overshoot_are_told_once(preserve: Any) -> None:
    """Gradient descent on λD diverges where its curvature is beyond 2/lr: told at a strength far beyond, not at one far below.

    With `anchor_with` distillation is damped, and without check_finite nothing is read from the device.
    """
    for strength, damps, checks, warned in [(3.0, False, True, 0), (1e3, False, True, 1), (1e3, True, True, 0), (1e3, False, False, 0)]:
        model = seeded()
        keeper = selfless.attach(model, preserve(strength), check_finite=checks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if damps:
            keeper.anchor_with(optimizer)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for task in range(2):
                for x, y in batches(task, count=20):
                    optimizer.zero_grad()
                    (F.cross_entropy(model(x), y) + keeper.penalty((x, y)).clamp(max=10.0)).backward()
                    optimizer.step()
                keeper.consolidate(batches(task))
        assert [str(w.message).startswith(f"{preserve(strength)} is so strong") for w in told].count(True) == warned, strength


def test_the_steps_of_sgd_are_those_of_the_optimizers_of_this_task() -> None:
    """s = lr/(2(1 + μ)), with Nesterov's momentum lr(1 + 2μ)/(2(1 + μ)); nothing of Adam, of other models, or of the task before."""
    model, other = seeded(), seeded()
    first, second, *rest = model.parameters()
    named = {id(p): name for name, p in model.named_parameters()}
    groups = [{"params": [first], "lr": 0.3}, {"params": [second], "lr": 0.3, "momentum": 0.5}, {"params": list(other.parameters())}]
    sgd = torch.optim.SGD(groups, lr=9.0)
    nesterov = torch.optim.SGD(rest[:1], lr=0.3, momentum=0.5, nesterov=True)
    adam = torch.optim.Adam(rest[1:], lr=9.0)
    optimizers, parameters = Optimizers(), dict(model.named_parameters())
    for optimizer in (sgd, nesterov, adam):
        optimizers.note(optimizer, is_anchored=False)
    want = {named[id(first)]: 0.15, named[id(second)]: 0.1, named[id(rest[0])]: 0.2}
    assert optimizers.sgd_steps(parameters) == pytest.approx(want)
    optimizers.end_task()
    assert optimizers.sgd_steps(parameters) == {}
    optimizers.note(nesterov, is_anchored=False)
    assert optimizers.sgd_steps(parameters) == pytest.approx({named[id(rest[0])]: 0.2})
