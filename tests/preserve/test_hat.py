"""HAT: embeddings move as in the paper's code, and used neurons are protected to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import HAT
from tests import oracles
from tests.preserve.heads import NAMES, accuracy, data, learn, made


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
        far = preserve.step_gates(state, by_layer, 0.0, torch.tensor(1e9))["embedding"]["all"]  # as far as embeddings may go
        assert_close(far, -6 * given.sign())
        assert_close(preserve.gate(state, share)["body.1"], torch.sigmoid(s * e[:24]))
        assert_close(preserve.hard_gate(state, None)["body.1"], (e[:24] > 0).float())
    used = {**keeper.state, "used": {"all": torch.arange(41) % 3 > 0}}
    gates = {n: given.sigmoid()[place] for n, place in used["place"].items()}
    free = [i for i in range(40) if i % 3 == 0]
    assert_close(preserve.gate_penalty(used, gates), sum(given.sigmoid()[i] for i in free) / len(free))


@pytest.mark.slow
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
    with pytest.raises(ValueError, match="has no activation module"):
        selfless.attach(made(), HAT(), layers=["body.3"])
    with pytest.raises(ValueError, match="has parameters too"):
        selfless.attach(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)), HAT())
    model = made()
    keeper = selfless.attach(model, HAT(), layers=["body.1", "body.3"])
    with pytest.raises(ValueError, match="batches=its steps"):
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
    assert not torch.equal(keeper.state["embedding"]["all"], moved)
    assert_close(keeper.state["embedding"]["all"], twin.state["embedding"]["all"], rtol=1e-4, atol=1e-5)
    before = keeper.state["embedding"]["all"].clone()
    ((F.cross_entropy(model(x, 0), y) + keeper.penalty()) * float("inf")).backward()
    opt.step()
    assert torch.equal(keeper.state["embedding"]["all"], before)


def test_gates_learn_from_a_loss_without_the_penalty_and_after_the_last_announced_batch() -> None:
    """The loss is then not scaled; and a gate that is as hard as it gets stays so."""
    model = made()
    keeper = selfless.attach(model, HAT(0.0, s_max=50.0), layers=["body.1", "body.3"], heads=NAMES)
    twin_model = made()
    twin = selfless.attach(twin_model, HAT(0.0, s_max=50.0), layers=["body.1", "body.3"], heads=NAMES)
    for one in (keeper, twin):
        one.parts[0].draw_noise = lambda n: torch.linspace(-0.1, 0.1, n)
        one.begin_epoch(0, 1, batches=2)
        gates, opt, shares = one.parts[0].gates, torch.optim.SGD(one.model.parameters(), lr=0.1), []
        for x, y in data(0)[:4]:
            opt.zero_grad()
            loss = F.cross_entropy(one.model(x, 0), y)
            (loss if one is keeper else loss + one.penalty()).backward()
            shares.append(gates.share)  # type: ignore[union-attr]
            opt.step()
        assert shares == [0.0, 1.0, 1.0, 1.0]
    assert not torch.equal(keeper.state["embedding"]["all"], torch.linspace(-0.1, 0.1, 40))
    assert_close(keeper.state["embedding"]["all"], twin.state["embedding"]["all"])
    keeper.notices.silence_epochs()
    keeper.begin_epoch(0, 1, batches=1)
    assert keeper.parts[0].gates.share == 1.0  # type: ignore[union-attr]


def test_a_head_that_is_added_in_a_task_does_not_hide_what_comes_after_it() -> None:
    """It is wired from the next task on; every other parameter is frozen as if it were not there."""
    model = made()
    keeper = selfless.attach(model, HAT(0.2, s_max=50.0), layers=["body.1", "body.3"], heads=NAMES)
    keeper.begin_epoch(0, 1, batches=1)
    values = {n: p.detach() for n, p in model.named_parameters()}
    found = [keeper.preserve.consolidate(keeper.state, {**new, **values}, {})["frozen"] for new in ({}, {"added": torch.zeros(3)})]  # type: ignore[attr-defined]
    assert found[0].keys() == found[1].keys() == values.keys()


def test_a_state_with_a_group_that_is_gone_still_loads() -> None:
    """Earlier versions saved the numbers that the gates of a task start from, as the group "fresh"."""
    model = made()
    keeper = selfless.attach(model, HAT(0.2, s_max=50.0), layers=["body.1", "body.3"], heads=NAMES)
    learn(model, keeper, 0, epochs=2)
    saved = keeper.state_dict()
    twin = selfless.attach(copy.deepcopy(model), HAT(0.2, s_max=50.0), layers=["body.1", "body.3"], heads=NAMES)
    twin.load_state_dict(saved | {"preserve.fresh.all": torch.zeros(40)})
    assert twin.tasks == 1
    for key, value in twin.state_dict().items():
        assert torch.equal(value, saved[key]), key
    with pytest.raises(ValueError, match="unknown to this keeper"):
        twin.load_state_dict(saved | {"preserve.stale.all": torch.zeros(40)})


def test_gates_that_a_compiled_model_does_not_run_are_an_error() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    compiled = torch.compile(model, backend="eager")
    x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))
    compiled(x)
    keeper = selfless.attach(compiled, HAT(0.75))
    keeper.begin_epoch(0, 1, batches=1)
    keeper.penalty((x, y))  # a loop may call it before the forward pass
    compiled(x)
    with pytest.raises(RuntimeError, match=r"HAT saw no forward pass .* must not have run before attach\(\)"):
        keeper.penalty((x, y))
    torch._dynamo.reset()
    compiled(x)
    keeper.penalty((x, y))
