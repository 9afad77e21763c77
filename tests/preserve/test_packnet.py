"""PackNet: old tasks stay as they were to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selfless
from selfless import LwF, PackNet
from tests import oracles
from tests.preserve.heads import NAMES, accuracy, data, learn, made


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_packnet_leaves_old_tasks_as_they_were_to_the_bit(optimizer: str) -> None:
    """Momentum, weight decay and Adam's own ideas notwithstanding; and new tasks are learnt."""
    model = made()
    keeper = selfless.attach(model, PackNet(0.6), sparsify="slnid:1e-3", layers=["body.1", "body.3"], heads=NAMES)
    x, logits = torch.cat([x for x, _ in data(7)]), []
    for t in range(3):
        opt: Any = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=1e-2)
        if optimizer == "sgd":
            opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        learn(model, keeper, t, epochs=15, optimizer=opt)
        with keeper.evaluating(t), torch.no_grad():
            assert accuracy(model, t) > 0.75
            logits.append(model(x, t))
        for u in range(t + 1):
            with keeper.evaluating(u), torch.no_grad():
                assert torch.equal(model(x, u), logits[u])
    with torch.no_grad():
        assert not torch.equal(model(x, 0), logits[0])  # without its mask the first task is not what it was
    assert 0 < keeper.capacity().free_parameters < 0.4


def test_packnet_owners_are_those_of_the_obvious_reference() -> None:
    model = made()
    keeper = selfless.attach(model, PackNet(0.7), heads=NAMES)
    owner, before = {n: [0] * p.numel() for n, p in model.named_parameters()}, dict[str, list[float]]()
    for t in range(3):
        for epoch in range(3):
            keeper.begin_epoch(epoch, 3)
            if epoch == 0:  # what is free starts a later task at 0
                for n in ("body.0.weight", "body.2.weight"):
                    assert [v == 0 for v in model.get_parameter(n).flatten().tolist()] == [t > 0 and o == 0 for o in owner[n]]
            if epoch == 2:  # as they are when pruning has just happened
                for n in ("body.0.weight", "body.2.weight"):
                    gone = keeper.state["pruned"][n].flatten().tolist()
                    want = oracles.packed(before[n], owner[n], t + 1, 0.7)
                    assert [o == 0 for o in want] == gone
                    owner[n] = want
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, y in data(t):
                opt.zero_grad()
                F.cross_entropy(model(x, t), y).backward()
                opt.step()
            before = {n: p.detach().flatten().tolist() for n, p in model.named_parameters()}
        for n in ("body.0.weight", "body.2.weight"):  # and stay at 0 until the task ends
            assert [v == 0 for v in before[n]] == [o == 0 for o in owner[n]]
        keeper.consolidate(data(t), forward=lambda m, b, t=t: m(b[0], t))
        assert not keeper.state["pruned"]
        for n in ("body.0.weight", "body.2.weight"):
            assert keeper.state["owner"][n].flatten().tolist() == owner[n]
        for n, own in keeper.state["owner"].items():
            if own.dim() == 1 and n.startswith("body"):
                assert (own == 1).all()  # biases are the first task's
            if n.startswith("heads"):
                assert (own == (int(n.split(".")[1]) + 1 if int(n.split(".")[1]) <= t else 0)).all()


def test_what_the_first_task_left_free_starts_the_second_at_zero() -> None:
    """Without epochs nothing was pruned in the first task, so that free weights have the values of that task."""
    model = made()
    keeper = selfless.attach(model, PackNet(0.5), heads=NAMES)
    keeper.consolidate(data(0), forward=lambda m, b: m(b[0], 0))
    free = keeper.state["owner"]["body.0.weight"] == 0
    assert model.body[0].weight[free].count_nonzero() == free.sum() > 0
    keeper.begin_epoch(0, 3)
    assert torch.equal(model.body[0].weight == 0, free)


def test_the_last_third_of_the_epochs_is_after_pruning() -> None:
    assert [epoch for epoch in range(12) if PackNet().starts_phase(epoch, 12)] == [0, 8]
    assert [epoch for epoch in range(12) if PackNet(retrain=0.5).starts_phase(epoch, 12)] == [0, 6]
    assert [epoch for epoch in range(2) if PackNet(retrain=0.9).starts_phase(epoch, 2)] == [0, 1]


def test_methods_that_keep_to_the_bit_refuse_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="running_mean"):
        selfless.attach(model, PackNet())
    selfless.attach(model, LwF()).detach()
    for bad in ({"strength": 1.0}, {"retrain": 1.0}, {"retrain": -0.1}):
        with pytest.raises(ValueError, match="share"):
            PackNet(**bad)


def test_a_head_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"names 'headz.0', .* did you mean 'heads'"):
        selfless.attach(made(), PackNet(0.5), heads=["headz.0", "headz.1"])
