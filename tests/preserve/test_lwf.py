"""LwF: the paper's loss, its warm-up, and loops that leave something out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import selfless
from selfless import EBLL, LwF
from tests import oracles
from tests.preserve.heads import NAMES, accuracy, data, learn, made


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_lwf_is_the_papers_loss(temperature: float) -> None:
    g = torch.Generator().manual_seed(0)
    z, old = torch.randn(7, 4, generator=g, requires_grad=True), torch.randn(7, 4, generator=g)
    got, want = LwF(1.0, temperature).distil(z, old), oracles.lwf(z, old, temperature)
    assert_close(got.double(), want)
    assert_close(torch.autograd.grad(got, z)[0], torch.autograd.grad(want, z)[0])
    assert float(LwF(1.0, temperature).distil(old, old)) == pytest.approx(0.0, abs=1e-7)


def test_lwf_keeps_old_outputs_on_new_inputs() -> None:
    """The stronger, the nearer the old heads' outputs on the new task's images stay to those of the network before it."""
    drift = []
    for strength in (0.0, 1.0, 5.0):
        model = made()
        keeper = selfless.attach(model, LwF(strength), heads=NAMES)
        learn(model, keeper, 0)
        x = torch.cat([x for x, _ in data(1)])
        before = model(x, 0).detach().softmax(1)
        learn(model, keeper, 1)
        assert accuracy(model, 1) > 0.8
        drift.append(float((model(x, 0).detach().softmax(1) - before).abs().mean()))
    assert drift[2] < drift[1] < drift[0]
    assert drift[2] < 0.5 * drift[0]


def test_a_warm_up_leaves_an_epoch_to_learn_in() -> None:
    assert [LwF(warmup=5).starts_phase(epoch, 3) for epoch in range(3)] == [True, False, True]
    model = made()
    keeper = selfless.attach(model, LwF(warmup=1), heads=NAMES)
    learn(model, keeper, 0)
    keeper.begin_epoch(0, 1)
    assert not keeper.state["held"]  # a task of one epoch has no warm-up


def test_lwf_warms_the_new_head_up_alone() -> None:
    """During the warm-up nothing but the new head moves, whatever the optimizer does; afterwards everything does."""
    model = made()
    keeper = selfless.attach(model, LwF(1.0, warmup=2), heads=NAMES)
    learn(model, keeper, 0, epochs=3)
    assert not keeper.state["held"]  # the first task has nothing to wait for
    before = copy.deepcopy(model.state_dict())
    opt = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for epoch in range(3):
        keeper.begin_epoch(epoch, 3)
        for x, y in data(1):
            opt.zero_grad()
            (F.cross_entropy(model(x, 1), y) + keeper.penalty((x, y))).backward()
            opt.step()
        moved = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
        assert moved == ({"heads.1.weight", "heads.1.bias"} if epoch < 2 else {n for n in before if "heads.2" not in n})


def test_lwf_in_a_loop_needs_the_batch_and_remembers_how_tasks_were_run() -> None:
    model = made()
    keeper = selfless.attach(model, LwF(1.0), sparsify="slni:1e-2", layers=["body.1", "body.3"])
    learn(model, keeper, 0)
    model(data(1)[0][0], 1)
    with pytest.raises(RuntimeError, match=r"keeper.penalty\(\(x, y\)\)"):
        keeper.penalty()
    state = keeper.state_dict()
    twin = selfless.attach(copy.deepcopy(model), LwF(1.0), sparsify="slni:1e-2", layers=["body.1", "body.3"])
    with pytest.raises(ValueError, match="forwards="):
        twin.load_state_dict(state)
    twin.load_state_dict(state, forwards=[lambda m, b: m(b[0], 0)])
    x, y = data(1)[0]
    for m in (model, twin.model):
        m(x, 1)
    assert_close(keeper.penalty((x, y)), twin.penalty((x, y)))
    assert not keeper.collector.take()  # the pass that compares is not one of the loop's


@pytest.mark.slow
def test_a_warm_up_that_a_loop_leaves_out_is_told_with_the_remedy() -> None:
    def train(kept: Any, heads: Any, begins_epochs: bool) -> None:
        model = made()
        keeper = selfless.attach(model, kept, heads=heads)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for t in range(2):
            for epoch in range(2):
                if begins_epochs:
                    keeper.begin_epoch(epoch, 2)
                for x, y in data(t):
                    opt.zero_grad()
                    (F.cross_entropy(model(x, t), y) + keeper.penalty((x, y))).backward()
                    opt.step()
            keeper.consolidate(data(t), forward=lambda m, b, t=t: m(b[0], t))

    for kept in (LwF(0.1, warmup=1), EBLL(0.1, code=3, steps=5)):
        train(kept, NAMES, begins_epochs=True)
        with pytest.warns(UserWarning, match=r"call keeper.begin_epoch\(epoch, epochs\)"):
            train(kept, NAMES, begins_epochs=False)
        with pytest.warns(UserWarning, match=r"heads=\[…\]"):
            train(kept, (), begins_epochs=True)
    train(LwF(0.1), (), begins_epochs=False)


@pytest.mark.parametrize("preserve", [LwF(), EBLL(steps=2)], ids=lambda p: p.name)
def test_comparing_old_outputs_does_not_move_running_statistics(preserve: LwF) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    keeper = selfless.attach(model, preserve)
    x, y = torch.randn(16, 6), torch.arange(16) % 3
    keeper.consolidate([(x, y)])
    model(x)
    before = {n: b.clone() for n, b in model.named_buffers()}
    keeper.penalty((x, y)).backward()
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert model[1].track_running_stats


@pytest.mark.parametrize("preserve", [LwF(1.0), EBLL(1.0)], ids=str)
def test_one_output_has_no_probabilities_to_hold(preserve: LwF) -> None:
    with pytest.raises(ValueError, match="this head has one output, whose softmax is always 1"):
        preserve.check_outputs(torch.ones(3, 1))
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1))
    keeper, x = selfless.attach(model, LwF(1.0)), torch.randn(5, 6)
    keeper.consolidate([(x, x[:, :1])])
    model(x)
    with pytest.raises(ValueError, match="this head has one output"):
        keeper.penalty((x, x[:, :1]))


def test_double_precision_is_kept() -> None:
    z, old = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    assert LwF(1.0).distil(z, old).dtype == torch.float64
