"""IMM: merged optima, L2-transfer and drop-transfer against obvious references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import selfless
from selfless import IMM
from tests import oracles
from tests.preserve.heads import NAMES, Small, data, learn, made


@pytest.mark.parametrize("merge", ["mean", "mode"])
def test_imm_is_the_mean_or_the_fisher_weighted_mean_of_the_task_optima(merge: Any) -> None:
    model = made(torch.float64)
    keeper = selfless.attach(model, IMM(1e-3, merge=merge, damping=1e-8), heads=NAMES)
    optima, fishers = [], []
    for t in range(3):
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in data(t):
            opt.zero_grad()
            (F.cross_entropy(model(x.double(), t), y) + keeper.penalty()).backward()
            opt.step()
        task = [(x.double(), y) for x, y in data(t)]
        call = lambda m, b, t=t: m(b[0], t)  # noqa: E731
        keeper.consolidate(task, forward=call)
        optima.append({n: p.detach().clone() for n, p in model.body.named_parameters(prefix="body")})
        found = selfless.importance.ewc(model, task, forward=call)
        fishers.append({n: found[n] + 1e-8 for n in optima[0]})
        own = {n: p.detach().clone() for n, p in model.named_parameters() if n.startswith(f"heads.{t}")}
        trained = {n: p.detach().clone() for n, p in model.named_parameters()}
        with keeper.evaluating(t):
            for n, want in oracles.merged(optima, None if merge == "mean" else fishers).items():
                assert_close(model.get_parameter(n).detach(), want)
            for n, value in own.items():  # a task's own head is that of its own optimum
                assert torch.equal(model.get_parameter(n), value)
        for n, value in trained.items():  # weight-transfer: training goes on from the optimum, not from the merger
            assert torch.equal(model.get_parameter(n), value)


@pytest.mark.parametrize("fisher", ["empirical", "sampled", "exact"])
def test_every_fisher_merges(fisher: Any) -> None:
    model = made()
    keeper = selfless.attach(model, IMM(1e-2, fisher=fisher), heads=NAMES)
    for t in range(2):
        keeper.consolidate(data(t, 1), forward=lambda m, b, t=t: m(b[0], t))
    assert all(bool((mass > 0).all()) for name, mass in keeper.state["mass"].items() if name.startswith("body"))
    with pytest.raises(ValueError, match="fisher"):
        IMM(fisher="drawn")  # type: ignore[arg-type]


def test_imm_l2_transfer_holds_a_task_to_the_last_ones_optimum() -> None:
    moved = []
    for strength in (0.0, 0.05, 1.0):
        model = made()
        keeper = selfless.attach(model, IMM(strength), heads=NAMES)
        learn(model, keeper, 0)
        before = model.body[0].weight.detach().clone()
        learn(model, keeper, 1)
        moved.append(float((model.body[0].weight.detach() - before).norm()))
    assert moved[2] < moved[1] < moved[0]
    assert not keeper.capacity().parameters  # it knows no free parameters


def test_imm_l2_transfer_leaves_the_heads_of_tasks_to_come_alone() -> None:
    model = made()
    keeper = selfless.attach(model, IMM(1e6), heads=NAMES)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper.anchor_with(opt)
    learn(model, keeper, 0, optimizer=opt)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    learn(model, keeper, 1, optimizer=opt)
    moved = {n: float((p.detach() - before[n]).norm()) for n, p in model.named_parameters()}
    assert moved["heads.1.weight"] > 0.01  # task 1's own: its random start is nobody's optimum
    assert all(moved[n] < 1e-5 for n in moved if not n.startswith("heads.1"))


def test_imm_drop_transfer_is_the_network_with_some_nodes_of_the_last_task() -> None:
    """Outputs and gradients of a training step are those of θ̃ written out; judged and counted on is θ itself."""
    torch.manual_seed(0)
    model, p = Small().double(), 0.3
    x, y = torch.randn(4, 1, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    keeper = selfless.attach(model, IMM(0.0, drop=p))
    plain = model(x)
    keeper.consolidate([(x, y)])
    before = {n: v.detach().clone() for n, v in model.named_parameters()}
    with torch.no_grad():
        for v in model.parameters():
            v.add_(0.3 * torch.randn_like(v))
    off = [True, False, False, False, True, False, True, False]  # three channels, five units
    keeper.parts[0].drops.draw = lambda n: torch.tensor([0.0 if gone else 1.0 for gone in off])  # type: ignore[union-attr]
    theta = {n: v.detach().clone().requires_grad_() for n, v in model.named_parameters()}
    nodes = {"conv": off[:3], "fc": off[3:]}
    made = {n: theta[n] if n.startswith("head") else torch.empty(0) for n in theta}
    for n in theta:
        if not n.startswith("head"):
            want = oracles.drop_transfer(theta[n].detach(), before[n], nodes[n.split(".")[0]], p)
            gone = torch.tensor(nodes[n.split(".")[0]]).view(-1, *[1] * (theta[n].dim() - 1))
            made[n] = torch.where(gone, before[n], theta[n] / (1 - p) - p / (1 - p) * before[n])
            assert_close(made[n].detach(), want)
            assert_close(IMM(0.0, drop=p).drop_nodes(keeper.state, {n: theta[n].detach()}, {n: gone.flatten()})[n], want)
    reference = Small().double()
    wanted = torch.func.functional_call(reference, made, (x,))
    assert_close(model(x), wanted)
    loss = F.cross_entropy(model(x), y)  # another pass of the same step has the same nodes
    for got, want in zip(
        torch.autograd.grad(loss, list(model.parameters())),
        torch.autograd.grad(F.cross_entropy(wanted, y), list(theta.values())),
        strict=True,
    ):
        assert_close(got, want)
    model.eval()
    assert_close(model(x), torch.func.functional_call(reference, {n: t.detach() for n, t in theta.items()}, (x,)))
    with keeper.evaluating(0):
        assert_close(model(x), plain)


def test_imm_draws_nothing_in_the_first_task() -> None:
    """Nor does a keeper that was saved and loaded there: the next random number is the same, so the loop goes on as if uninterrupted."""
    x, y = data(0)[0]
    numbers = []
    for resumes in (False, True):
        model = made()
        keeper = selfless.attach(model, IMM(0.0, drop=0.5), heads=NAMES)
        if resumes:
            keeper.load_state_dict(keeper.state_dict())
        torch.manual_seed(3)
        F.cross_entropy(model(x, 0), y).backward()
        numbers.append(float(torch.rand(())))
    torch.manual_seed(3)
    assert numbers == [float(torch.rand(()))] * 2


def test_imm_draws_nodes_anew_in_every_step_and_on_average_trains_theta() -> None:
    model = made()
    keeper = selfless.attach(model, IMM(0.0, drop=0.5), heads=NAMES)
    x, y = data(1)[0]
    assert torch.equal(model(x, 0), model(x, 0))  # the first task has nothing to go back to
    learn(model, keeper, 0)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):  # away from θ_{k−1}
        opt.zero_grad()
        F.cross_entropy(model(x, 1), y).backward()
        opt.step()
    first = model.body[0](x).detach()
    assert torch.equal(first, model.body[0](x).detach())
    drawn = []
    for _ in range(600):
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        drawn.append(model.body[0](x).detach())
    assert not torch.equal(drawn[0], drawn[1])
    model.eval()
    assert_close(torch.stack(drawn).mean(0), model.body[0](x).detach(), rtol=0.0, atol=0.15)
    keeper.detach()
    assert not model.body[0]._forward_hooks
    with pytest.raises(ValueError, match="below 1"):
        IMM(drop=1.0)
    assert str(IMM(0.1, drop=0.5)) == "imm:0.1,drop=0.5"
