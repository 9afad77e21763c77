"""Names of the keeper's first interface still work, with a warning that tells the new one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import selfless
from selfless import HAT, LwF, PackNet
from tests.preserve.heads import NAMES, data, learn, made


def test_turn_is_begin_epoch() -> None:
    model = made()
    keeper = selfless.attach(model, LwF(1.0, warmup=1), heads=NAMES)
    learn(model, keeper, 0, epochs=1)
    with pytest.warns(DeprecationWarning, match=r"keeper\.turn is now keeper\.begin_epoch"):
        keeper.turn(0, 2)
    assert keeper.state["held"]  # the warm-up has begun
    with pytest.warns(DeprecationWarning, match="begin_epoch"):
        keeper.turn(1, 2, batches=5)
    assert not keeper.state["held"]


def test_as_task_is_evaluating() -> None:
    model, (x, _) = made(), data(0)[0]
    keeper = selfless.attach(model, PackNet(0.5), heads=NAMES)
    for task in range(2):
        learn(model, keeper, task, epochs=2)
    with keeper.evaluating(0), torch.no_grad():
        want = model(x, 0)
    with pytest.warns(DeprecationWarning, match=r"keeper\.as_task is now keeper\.evaluating"):
        evaluating = keeper.as_task(0)
    with evaluating, torch.no_grad():
        assert torch.equal(model(x, 0), want)
    assert not torch.equal(model(x, 0), want)  # afterwards the network is the trained one again


def test_draw_gates_sets_the_numbers_that_gates_start_from() -> None:
    model, (x, y) = made(), data(0)[0]
    keeper = selfless.attach(model, HAT(0.2, s_max=50.0), layers=["body.1", "body.3"], heads=NAMES)
    with pytest.warns(DeprecationWarning, match=r"keeper\.draw_gates will be removed: seed torch"):
        keeper.draw_gates(torch.linspace(-2, 2, 40))
    keeper.begin_epoch(0, 1, batches=1)
    assert torch.equal(keeper.state["embedding"]["all"], torch.linspace(-2, 2, 40))
    (F.cross_entropy(model(x, 0), y) + keeper.penalty((x, y))).backward()
