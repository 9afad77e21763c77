"""EBLL: the paper's two losses, its codes, and what it needs."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import EBLL, LwF
from tests import oracles
from tests.preserve.heads import NAMES, accuracy, data, learn, made


def test_ebll_is_the_papers_two_losses_written_out() -> None:
    """The encoder that a task leaves behind, and what the drift of its code costs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    preserve = EBLL(2.0, drift=0.3, code=4, reconstruction=0.2, steps=7, rate=0.02)
    keeper = selfless.attach(model, preserve)
    batches = [[(x.double()[: 6 - k], y[: 6 - k]) for k, (x, y) in enumerate(data(t, 3, 6))] for t in range(2)]  # batches of other sizes
    wanted: list[Tensor] = []
    for t in range(2):
        keeper.consolidate(iter(batches[t]))  # a generator, too, is gone through several times
        features = [(model[:2](x).detach(), y) for x, y in batches[t]]
        start = preserve.draw_weights(features[0][0][None], torch.ones(1, dtype=torch.float64), t)
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


@pytest.mark.slow
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


def test_the_encoders_of_members_are_those_of_each_alone() -> None:
    """From the same first weights, of the variance 1/inputs of each layer."""
    preserve, draw = EBLL(steps=3, code=40), torch.Generator().manual_seed(0)
    features = torch.stack([torch.randn(8, 60, generator=draw).relu() * size for size in (1.0, 5.0)])
    fitted = preserve.fit([(features, lambda made: made.square().mean((1, 2)).sum())] * 3, 1)
    alone = [preserve.fit([(one[None], lambda made: made.square().mean((1, 2)).sum())] * 3, 1)[0] for one in features]
    assert_close(fitted, torch.stack(alone))
    encoder, decoder = preserve.draw_weights(features, torch.ones(1), 1)
    assert float(encoder.detach().std()) == pytest.approx(60**-0.5, rel=0.1)
    assert float(decoder.detach().std()) == pytest.approx(40**-0.5, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("width", [16, 256, pytest.param(4096, marks=pytest.mark.slow)])
def test_ebll_codes_tell_samples_apart_at_any_width(width: int) -> None:
    """A code that is 0 or 1 whatever comes in would cost nothing when it drifts."""
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(1, 64, width, generator=draw).relu()
    head, y = torch.randn(10, width, generator=draw) / width, torch.arange(64) % 10
    encoder = EBLL(steps=60).fit(itertools.repeat((features, lambda made: F.cross_entropy(made[0] @ head.T, y))), 0)[0]
    codes = torch.sigmoid(features[0] @ encoder.T)
    assert float(((codes > 0.01) & (codes < 0.99)).float().mean()) > 0.9
    assert float(codes.std(0).mean()) > 0.05


@pytest.mark.slow
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
