"""The rivals, each against an obvious reference and doing what its paper says it does."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests import oracles
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import EBLL, EWC, HAT, IMM, LocalMAS, LwF, OnlineEWC, PackNet, RWalk


class Heads(nn.Module):
    """Shared layers and a head for each task."""

    def __init__(self, tasks: int = 3, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(16, classes) for _ in range(tasks)])

    def forward(self, x: Tensor, task: int) -> Tensor:
        out: Tensor = self.heads[task](self.body(x))
        return out


NAMES = ["heads.0", "heads.1", "heads.2"]


def made(dtype: torch.dtype = torch.float32) -> Heads:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Heads().to(dtype)


def data(task: int, count: int = 5, size: int = 20) -> list[tuple[Tensor, Tensor]]:
    """Labels that can be learnt: the largest of three sums, other ones for each task."""
    g = torch.Generator().manual_seed(task)
    turn = torch.randn(6, 3, generator=g)
    return [(x, (x @ turn).argmax(1)) for x in (torch.randn(size, 6, generator=g) for _ in range(count))]


def learn(model: nn.Module, keeper: Any, t: int, epochs: int = 6, optimizer: Any = None, **more: Any) -> None:
    opt = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **more)
    for epoch in range(epochs):
        keeper.begin_epoch(epoch, epochs, batches=len(data(t)))
        for x, y in data(t):
            loss = F.cross_entropy(model(x, t), y) + keeper.penalty((x, y))
            opt.zero_grad()
            loss.backward()
            opt.step()
    keeper.consolidate(data(t), forward=lambda m, b, t=t: m(b[0], t))


def accuracy(model: nn.Module, t: int) -> float:
    with torch.no_grad():
        return float(torch.cat([(model(x, t).argmax(1) == y).float() for x, y in data(t)]).mean())


# --------------------------------------------------------------------------------------------------------------------- LwF
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


# -------------------------------------------------------------------------------------------------------------------- EBLL
def test_ebll_is_the_papers_two_losses_written_out() -> None:
    """The encoder that a task leaves behind, and what the drift of its code costs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    preserve = EBLL(2.0, drift=0.3, code=4, reconstruction=0.2, steps=7, rate=0.02)
    keeper = selfless.attach(model, preserve)
    batches = [[(x.double(), y) for x, y in data(t, 3, 6)] for t in range(2)]
    wanted: list[Tensor] = []
    for t in range(2):
        keeper.consolidate(iter(batches[t]))  # a generator, too, is gone through several times
        features = [(model[:2](x).detach(), y) for x, y in batches[t]]
        start = preserve._first_weights(features[0][0][None], torch.ones(1, dtype=torch.float64), t)
        head = (model[2].weight.detach(), model[2].bias.detach())
        cycled = [features[k % 3] for k in range(7)]
        wanted.append(oracles.encoder((start[0][0].detach(), start[1][0].detach()), cycled, head, 0.2, 0.02))
        assert_close(keeper.state["encoder"]["all"], torch.stack(wanted))
    x, y = batches[1][0]
    before, old = model[:2](x).detach(), model(x).detach()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    cost = oracles.code_drift(model[:2](x).detach(), before, torch.stack(wanted), 0.3)
    want = 2.0 * (float(oracles.lwf(model(x).detach(), old, 2.0)) + cost)
    assert keeper.penalty((x, y)).item() == pytest.approx(want, rel=1e-5)  # the distillation is in float32


def test_ebll_keeps_the_codes_of_old_tasks_on_new_inputs() -> None:
    """At the same strength its code of the first task drifts less than under LwF, and the new task is learnt."""
    x, drift, encoder = torch.cat([x for x, _ in data(1)]), dict[str, float](), torch.empty(0)
    methods: dict[str, LwF] = {"ebll": EBLL(0.5, drift=5.0, code=8), "lwf": LwF(0.5, warmup=1)}
    for name, preserve in methods.items():
        model = made()
        keeper = selfless.attach(model, preserve, heads=NAMES)
        learn(model, keeper, 0)
        if name == "ebll":
            encoder = keeper.state["encoder"]["all"][0]
        before = torch.sigmoid(model.body(x) @ encoder.T).detach()
        learn(model, keeper, 1)
        assert accuracy(model, 1) > 0.8
        drift[name] = float((torch.sigmoid(model.body(x) @ encoder.T).detach() - before).square().sum(1).mean())
    assert drift["ebll"] < 0.5 * drift["lwf"]


@pytest.mark.parametrize("width", [16, 256, 4096])
def test_ebll_codes_tell_samples_apart_at_any_width(width: int) -> None:
    """A code that is 0 or 1 whatever comes in would cost nothing when it drifts."""
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(1, 64, width, generator=draw).relu()
    head, y = torch.randn(10, width, generator=draw) / width, torch.arange(64) % 10
    encoder = EBLL(steps=60).fit(itertools.repeat((features, lambda made: F.cross_entropy(made[0] @ head.T, y))), 0)[0]
    codes = torch.sigmoid(features[0] @ encoder.T)
    assert float(((codes > 0.01) & (codes < 0.99)).float().mean()) > 0.9
    assert float(codes.std(0).mean()) > 0.05


def test_ebll_codes_what_the_task_needs() -> None:
    """Through its code the task is still solved: reconstructed features give the head what it reads."""
    model = made()
    keeper = selfless.attach(model, EBLL(steps=200), heads=NAMES)
    learn(model, keeper, 0, epochs=20)
    x, y = (torch.cat(parts) for parts in zip(*data(0), strict=True))
    code = torch.sigmoid(model.body(x).detach() @ keeper.state["encoder"]["all"][0].T)
    decoded = code @ torch.linalg.lstsq(code, model.body(x).detach()).solution
    assert float((model.heads[0](decoded).argmax(1) == y).float().mean()) > 0.85


def test_ebll_says_what_it_needs() -> None:
    model = made()
    keeper = selfless.attach(model, EBLL(steps=2), heads=NAMES)
    with pytest.raises(ValueError, match="needs labels"):
        keeper.consolidate([torch.randn(4, 6)], forward=lambda m, b: m(b, 0))
    with pytest.raises(ValueError, match="batches are empty"):
        keeper.consolidate([], forward=lambda m, b: m(b[0], 0))
    assert keeper.tasks == 0
    for bad in ({"code": 0}, {"steps": 0}, {"drift": -1.0}, {"rate": 0.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            EBLL(**bad)  # type: ignore[arg-type]
    assert str(EBLL(0.5, drift=1.0)) == "ebll:0.5,drift=1"


def test_a_warm_up_that_a_loop_leaves_out_is_told_with_the_remedy() -> None:
    def train(kept: Any, heads: Any, turn: bool) -> None:
        model = made()
        keeper = selfless.attach(model, kept, heads=heads)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for t in range(2):
            if turn:
                keeper.begin_epoch(0, 2)
            for x, y in data(t):
                opt.zero_grad()
                (F.cross_entropy(model(x, t), y) + keeper.penalty((x, y))).backward()
                opt.step()
            keeper.consolidate(data(t), forward=lambda m, b, t=t: m(b[0], t))

    for kept in (LwF(0.1, warmup=1), EBLL(0.1, code=3)):
        train(kept, NAMES, turn=True)
        with pytest.warns(UserWarning, match=r"call keeper.begin_epoch\(epoch, epochs\)"):
            train(kept, NAMES, turn=False)
        with pytest.warns(UserWarning, match=r"heads=\[…\]"):
            train(kept, (), turn=True)
    train(LwF(0.1), (), turn=False)


# --------------------------------------------------------------------------------------------------------------------- IMM
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


class Small(nn.Module):
    """A convolution and a linear layer with nodes, activations as functions, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.head = nn.Conv2d(1, 3, 3), nn.Linear(12, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.fc(F.relu(self.conv(x)).flatten(1))))
        return out


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


# ----------------------------------------------------------------------------------------------------------------- PackNet
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
        keeper.consolidate(data(t), forward=lambda m, b, t=t: m(b[0], t))
        for n in ("body.0.weight", "body.2.weight"):
            assert keeper.state["owner"][n].flatten().tolist() == owner[n]
        for n, own in keeper.state["owner"].items():
            if own.dim() == 1 and n.startswith("body"):
                assert (own == 1).all()  # biases are the first task's
            if n.startswith("heads"):
                assert (own == (int(n.split(".")[1]) + 1 if int(n.split(".")[1]) <= t else 0)).all()


def test_methods_that_keep_to_the_bit_refuse_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="running_mean"):
        selfless.attach(model, PackNet())
    selfless.attach(model, LwF()).detach()
    for bad in ({"strength": 1.0}, {"retrain": 1.0}, {"retrain": -0.1}):
        with pytest.raises(ValueError, match="share"):
            PackNet(**bad)


# ------------------------------------------------------------------------------------------------- RWalk, MAS in its local form
def test_rwalk_is_the_two_recursions_written_out() -> None:
    """Every entry of a linear model, step by step, over two tasks; Ω is both parts over their largest."""
    model = nn.Linear(3, 2).double()
    keeper = selfless.attach(model, RWalk(1.0, average=0.7, every=4, damping=1e-3))
    names = [n for n, _ in model.named_parameters()]
    entries = [(n, i) for n, p in model.named_parameters() for i in range(p.numel())]
    fishers, olds = dict.fromkeys(entries, 0.0), dict[tuple[str, int], float]()
    for t in range(2):
        g = torch.Generator().manual_seed(t)
        opt, steps = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), dict[tuple[str, int], list[tuple[float, float, float]]]()
        batches = [(torch.randn(8, 3, generator=g).double(), torch.randint(0, 2, (8,), generator=g)) for _ in range(10)]
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            task = dict(zip(names, torch.autograd.grad(loss, list(model.parameters()), retain_graph=True), strict=True))
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            opt.zero_grad()
            (loss + keeper.penalty()).backward()
            opt.step()
            for n, i in entries:
                after = model.get_parameter(n).detach().flatten()[i].item()
                steps.setdefault((n, i), []).append((before[n].flatten()[i].item(), after, task[n].flatten()[i].item()))
        keeper.consolidate(batches)
        found = {e: oracles.rwalk(steps[e], 0.7, 4, 1e-3, fishers[e]) for e in entries}
        fishers = {e: f for e, (f, _) in found.items()}
        most_f, most_s = max(fishers.values()), max(s for _, s in found.values())
        olds = {e: (s / most_s + olds[e]) / 2 if olds else s / most_s for e, (_, s) in found.items()}
        for n, i in entries:
            want = fishers[n, i] / most_f + olds[n, i]
            assert keeper.state["omega"][n].flatten()[i].item() == pytest.approx(want, rel=1e-9)


def test_local_mas_is_hebbs_rule() -> None:
    model = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    batches = [torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    keeper = selfless.attach(model, LocalMAS(1.0))
    keeper.consolidate(batches)
    linear: list[Any] = [model[0], model[2], model[4]]
    want = oracles.hebbian([m.weight.detach() for m in linear], [m.bias.detach() for m in linear], torch.cat(batches))
    for k, (weight, bias) in zip((0, 2, 4), want, strict=True):
        assert_close(keeper.state["omega"][f"{k}.weight"], weight)
        assert_close(keeper.state["omega"][f"{k}.bias"], bias)
    plain = selfless.importance.mas(model, batches)
    assert not torch.allclose(plain["0.weight"], keeper.state["omega"]["0.weight"], rtol=0.1)  # it is another measure
    assert_close(plain["4.weight"], keeper.state["omega"]["4.weight"])  # of the last layer it is the same


def test_local_mas_with_activations_as_functions_and_convolutions() -> None:
    torch.manual_seed(0)
    model, x = Small().double(), torch.randn(5, 1, 4, 4, dtype=torch.float64)
    keeper = selfless.attach(model, LocalMAS(1.0))
    keeper.consolidate([x])
    total: Tensor = torch.zeros_like(model.conv.weight)
    for one in x:  # ∂‖relu(conv(x))‖²/∂kernel, a sample at a time
        total += torch.autograd.grad(F.relu(model.conv(one[None])).square().sum(), model.conv.weight)[0].abs()
    assert_close(keeper.state["omega"]["conv.weight"], total / len(x))
    other = nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="use MAS there"):
        selfless.attach(other, LocalMAS(), layers=["1"]).consolidate([torch.randn(3, 4)])


# --------------------------------------------------------------------------------------------------------------------- HAT
def test_hat_moves_its_embeddings_as_the_papers_code_does() -> None:
    """Compensation, clamp and all, over the whole range of slopes."""
    preserve = HAT(0.75, s_max=400.0)
    model = made()
    keeper = selfless.attach(model, preserve, layers=["body.1", "body.3"], heads=NAMES)
    g = torch.Generator().manual_seed(0)
    e, given = 2 * torch.randn(40, generator=g), torch.randn(40, generator=g)
    for share in (0.0, 0.01, 0.2, 1.0):
        s = 1 / 400 + (400 - 1 / 400) * share
        state = {**keeper.state, "embedding": {"all": e}}
        by_layer = {n: given[place] for n, place in state["place"].items()}
        new = preserve.step_gates(state, by_layer, share, torch.tensor(1e-3))["embedding"]["all"]
        want = (e.double() - 1e-3 * oracles.hat_gradient(e, given, s, 400.0, 50.0)).clamp(-6, 6)
        assert_close(new.double(), want, rtol=1e-4, atol=1e-5)
        assert_close(preserve.gate(state, share)["body.1"], torch.sigmoid(s * e[:24]))
    used = {**keeper.state, "used": {"all": torch.arange(41) % 2 == 0}}
    gates = {n: given.sigmoid()[place] for n, place in used["place"].items()}
    free = [i for i in range(40) if i % 2 == 1]
    assert_close(preserve.gate_penalty(used, gates), sum(given.sigmoid()[i] for i in free) / len(free))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_hat_protects_to_the_bit(optimizer: str) -> None:
    """Old tasks' logits with their own gates, after momentum, weight decay and Adam; the loss of neurons is paid for in free ones."""
    model = made()
    keeper = selfless.attach(model, HAT(0.2, s_max=50.0, rate=0.1), sparsify="slnid:1e-3", layers=["body.1", "body.3"], heads=NAMES)
    x, logits, free = torch.cat([x for x, _ in data(7)]), [], [1.0]
    torch.manual_seed(0)
    for t in range(3):
        opt: Any = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=1e-2)
        if optimizer == "sgd":
            opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        learn(model, keeper, t, epochs=15, optimizer=opt)
        model.eval()
        with keeper.evaluating(t), torch.no_grad():
            assert accuracy(model, t) > 0.7
            logits.append(model(x, t))
        for u in range(t + 1):
            with keeper.evaluating(u), torch.no_grad():
                assert torch.equal(model(x, u), logits[u])
        model.train()
        free.append(keeper.capacity().free_parameters)
    assert free[0] > free[1] > free[3]
    model.eval()
    with keeper.evaluating(1), torch.no_grad():
        assert not torch.equal(model(x, 0), logits[0])  # another task's gates: not the same network


def test_hat_freezes_what_stands_between_used_neurons() -> None:
    """Entry by entry: a weight by both its ends, a bias by its own; inputs count as used, heads to come as free."""
    model = made()
    keeper = selfless.attach(model, HAT(0.2, s_max=50.0), layers=["body.1", "body.3"], heads=NAMES)
    torch.manual_seed(1)
    learn(model, keeper, 0, epochs=2)
    first, second = keeper.state["kept"]["all"][0].split([24, 16])
    frozen = keeper.state["frozen"]
    for i in range(16):
        assert bool(frozen["body.2.bias"][i]) == bool(second[i])
        for j in range(24):
            assert bool(frozen["body.2.weight"][i, j]) == bool(second[i] and first[j])
    for i in range(24):
        assert (frozen["body.0.weight"][i] == first[i]).all()
    assert (frozen["heads.0.weight"] == second).all()
    assert frozen["heads.0.bias"].all()
    assert not frozen["heads.1.weight"].any()


def test_hat_says_what_it_cannot_gate_and_what_the_loop_must_tell() -> None:
    with pytest.raises(ValueError, match=r"nn.ReLU\(\)"):
        selfless.attach(Functional(), HAT(), layers=["fc"])
    with pytest.raises(ValueError, match=r'heads=\["heads.0", …\]'):
        selfless.attach(made(), HAT())
    selfless.attach(made(), HAT(), heads=NAMES).detach()  # the remedy
    with pytest.raises(ValueError, match="has no gate"):
        selfless.attach(made(), HAT(), layers=["body.3"])
    with pytest.raises(ValueError, match="has parameters too"):
        selfless.attach(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)), HAT())
    model = made()
    keeper = selfless.attach(model, HAT(), layers=["body.1", "body.3"])
    with pytest.raises(ValueError, match=r"batches=len\(loader\)"):
        keeper.begin_epoch(0, 3)
    with pytest.raises(RuntimeError, match=r"keeper\.begin_epoch"):
        keeper.penalty()
    keeper.detach()
    assert not model.body[1]._forward_hooks


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.fc(x)))
        return out


def test_hat_through_convolutions(tmp_path: Any) -> None:
    """A convolution's channels gate the columns of the linear layer that reads them flattened, every position alike."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 2))
    keeper = selfless.attach(model, HAT(0.1, s_max=50.0, rate=0.05), layers=["1", "5"])
    batches = {t: [(torch.randn(16, 1, 6, 6) + t, torch.randint(0, 2, (16,))) for _ in range(4)] for t in range(2)}
    logits: list[Tensor] = []
    for t in range(2):
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for epoch in range(3):
            keeper.begin_epoch(epoch, 3, batches=4)
            for x, y in batches[t]:
                opt.zero_grad()
                (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
                opt.step()
        keeper.consolidate(batches[t])
        model.eval()
        with keeper.evaluating(0), torch.no_grad():
            logits.append(model(batches[0][0][0]))
        model.train()
    assert torch.equal(logits[0], logits[1])
    kept = keeper.state["kept"]["all"]
    used = (kept[0] | kept[1])[:5]
    rows = (kept[0] | kept[1])[5:]
    want = rows[:, None] & used.repeat_interleave(4)[None, :]
    assert torch.equal(keeper.state["frozen"]["4.weight"], want)


@pytest.mark.parametrize("factor", [1.0, 1024.0])
def test_hats_gates_do_not_see_how_a_loss_is_scaled(factor: float) -> None:
    """A GradScaler's factor, or a loss divided over accumulated batches; and a step whose gradients overflowed leaves the gates alone."""
    model = made()
    keeper = selfless.attach(model, HAT(0.2, s_max=50.0, rate=0.1), layers=["body.1", "body.3"], heads=NAMES)
    keeper.parts[0].draw_noise = lambda n: torch.linspace(-2, 2, n)
    keeper.begin_epoch(0, 1, batches=4)
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    x, y = data(0)[0]
    for half in (0, 1):
        rows = slice(10 * half, 10 * half + 10)
        ((F.cross_entropy(model(x[rows], 0), y[rows]) + keeper.penalty()) * factor / 2).backward()
    opt.step()
    moved = keeper.state["embedding"]["all"]
    assert torch.equal(moved, torch.linspace(-2, 2, 40))  # a rate of 0 is a rate of 0
    opt.param_groups[0]["lr"] = 1e-9
    for half in (0, 1):
        rows = slice(10 * half, 10 * half + 10)
        ((F.cross_entropy(model(x[rows], 0), y[rows]) + keeper.penalty()) * factor / 2).backward()
    opt.step()
    twin_model = made()
    twin = selfless.attach(twin_model, HAT(0.2, s_max=50.0, rate=0.1), layers=["body.1", "body.3"], heads=NAMES)
    twin.parts[0].draw_noise = lambda n: torch.linspace(-2, 2, n)
    twin.begin_epoch(0, 1, batches=4)
    twin.parts[0].gates.steps = 1  # type: ignore[union-attr]
    (F.cross_entropy(twin_model(x, 0), y) + twin.penalty()).backward()
    torch.optim.SGD(twin_model.parameters(), lr=1e-9).step()
    assert_close(keeper.state["embedding"]["all"], twin.state["embedding"]["all"], rtol=1e-4, atol=1e-5)
    before = keeper.state["embedding"]["all"].clone()
    ((F.cross_entropy(model(x, 0), y) + keeper.penalty()) * float("inf")).backward()
    opt.step()
    assert torch.equal(keeper.state["embedding"]["all"], before)


@pytest.mark.parametrize("preserve", [LwF(), EBLL()], ids=lambda p: p.name)
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


def test_random_walk_takes_single_numbers() -> None:
    """A learned temperature, say: a parameter without axes."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * self.scale

    torch.manual_seed(0)
    model = Scaled()
    keeper = selfless.attach(model, RWalk(every=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(16, 6), torch.arange(16) % 3
    for _ in range(5):
        loss = F.cross_entropy(model(x), y) + keeper.penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    keeper.consolidate([(x, y)])
    assert float(keeper.state["omega"]["scale"]) > 0


@pytest.mark.parametrize(("preserve", "d"), [(OnlineEWC(5.0), 0.9), (OnlineEWC(5.0, decay=0.5), 0.5), (EWC(5.0), 1.0)], ids=str)
def test_online_ewc_fades_what_was_important(preserve: EWC, d: float) -> None:
    """After three tasks Ω = d(dΩ₁ + Ω₂) + Ω₃, each Ω by a loop over the samples; the anchor is the last task's θ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    keeper, found = selfless.attach(model, preserve), []
    for t in range(3):
        batches, opt = [(x.double(), y) for x, y in data(t, 3, 6)], torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches:
            opt.zero_grad()
            (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
            opt.step()
        found.append(oracles.omega(model, batches, oracles.log_likelihood, 2))
        model.train()
        keeper.consolidate(batches)
    first, second, third = found
    for n, p in model.named_parameters():
        assert_close(keeper.state["omega"][n], d * (d * first[n] + second[n]) + third[n])
        assert_close(keeper.state["anchor"][n], p.detach())


def test_online_ewc_is_of_one_kind() -> None:
    with pytest.raises(ValueError, match="use EWC"):
        OnlineEWC(mode="per-task")


def test_a_head_that_is_not_there_is_named() -> None:
    model = made()
    keeper = selfless.attach(model, PackNet(0.5), heads=["headz.0", "headz.1"])
    with pytest.raises(ValueError, match=r"names 'headz.0' for task 1"):
        keeper.consolidate(data(0), forward=lambda m, b: m(b[0], 0))
