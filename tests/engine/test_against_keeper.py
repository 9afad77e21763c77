"""The engine against the keeper in a plain loop: the same parameters, importances and accuracies."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numpy.testing import assert_allclose
from torch import nn
from torch.testing import assert_close

import selfless
from selfless import (
    AGSCL,
    EBLL,
    EWC,
    GPM,
    HAT,
    IMM,
    MAS,
    SGP,
    SI,
    SLNI,
    SLNID,
    SNI,
    SNID,
    DeCov,
    DERpp,
    L1Param,
    L1Rep,
    L2Param,
    LocalMAS,
    LwF,
    NoPreserver,
    NoSparsifier,
    OnlineEWC,
    OrthReg,
    PackNet,
    Run,
    RWalk,
    SparingDeCov,
)
from selfless.data import stream
from selfless.engine import rng
from selfless.engine.learner import Learner
from selfless.models import build
from selfless.preserve.capabilities import Encodes
from tests.engine.small_runs import small

pytestmark = pytest.mark.slow


def own_rows(keeper: selfless.Keeper, heads: list[range]) -> None:
    """Whose head each row of the output layer is: `heads=` speaks of whole parameters."""
    owner = torch.tensor([t for t, head in enumerate(heads) for _ in head], dtype=torch.int16)
    named = {name: p for name, p in keeper.model.named_parameters() if name.startswith("head.")}
    for part in keeper.parts:
        part.place_owners({name: owner.view(-1, *[1] * (p.dim() - 1)).expand(p.shape).clone() for name, p in named.items()})


def nodes(run: Run, task: int, epoch: int, place: int) -> Any:
    """Which nodes the engine turns off in a step."""
    key = rng.stream_key(torch.tensor([run.seed]), "drop", task, epoch)
    return lambda n: rng.uniform_at(key, place * run.batch * n + torch.arange(n))[0]


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params, run: torch.optim.SGD(params, lr=run.lr, momentum=run.momentum),
    "adam": lambda params, run: torch.optim.Adam(params, lr=run.lr, betas=(run.momentum, 0.999), weight_decay=run.weight_decay),
    "adamw": lambda params, run: torch.optim.AdamW(params, lr=run.lr, betas=(run.momentum, 0.999), weight_decay=run.weight_decay),
}


def by_hand(run: Run) -> tuple[nn.Module, selfless.Keeper, list[list[float]]]:
    """The same run as an engineer would write it: a plain loop with `attach`."""
    tasks = stream(run.stream, seed=run.seed)
    model = build(run.model, outputs=tasks.outputs, input_shape=tasks.input_shape, seed=run.seed)
    keeper = selfless.attach(model, run.preserve, run.sparsify, layers=list(model.hidden))
    own_rows(keeper, [task.heads[0] for task in tasks.tasks])
    rows = []
    for t, task in enumerate(tasks.tasks):
        data, head = task.train.resident(), slice(task.heads[0].start, task.heads[0].stop)
        opt = OPTIMIZERS[run.optimizer](model.parameters(), run)
        if run.anchor == "implicit":
            keeper.anchor_with(opt)
        model.train()
        for epoch in range(run.epochs):
            for part in keeper.parts:
                part.draw_noise = lambda n, t=t: rng.normal(rng.stream_key(torch.tensor([run.seed]), "gates", t, 0), n)[0]
            keeper.begin_epoch(epoch, run.epochs, batches=-(-len(data) // run.batch))
            order = rng.order(rng.stream_key(torch.tensor([run.seed]), "order", t, epoch), len(data))[0]
            for place, index in enumerate(order.split(run.batch)):
                x, y = data.batch(index)
                for part in keeper.parts:
                    if part.drops is not None:
                        part.drops.draw = nodes(run, t, epoch, place)
                loss = F.cross_entropy(model(x)[:, head], y - head.start) + keeper.penalty((x, y))
                opt.zero_grad()
                loss.backward()
                opt.step()
        order = torch.arange(len(data))
        if any(isinstance(term, Encodes) for term in run.preserve.parts):  # in this order
            order = rng.order(rng.stream_key(torch.tensor([run.seed]), "encoder", t), len(data))[0]
        batches = [data.batch(index) for index in order.split(run.batch)]
        keeper.consolidate([(x, y - head.start) for x, y in batches], forward=lambda m, b, head=head: m(b[0])[:, head])
        model.eval()
        row = []
        for u, other in enumerate(tasks.evaluate):
            x, y = other.test.resident().batch(torch.arange(len(other.test)))
            start, stop = other.heads[0].start, other.heads[0].stop
            with keeper.evaluating(min(u, t)), torch.no_grad():
                row.append((model(x)[:, start:stop].argmax(1) == y - start).double().mean().item())
        rows.append(row)
    return model, keeper, rows


COMMON: list[tuple[Any, Any, str]] = [
    (MAS(0.1), SLNID(1e-2), "implicit"),
    (EWC(5.0), SNID(1e-2, discount="max"), "implicit"),
    (SI(1.0), SLNI(1e-2), "implicit"),
    (LwF(1.0) + MAS(0.1), SLNID(1e-2) + DeCov(1e-2), "implicit"),
    (HAT(0.75) + SI(0.1), SLNID(1e-2), "implicit"),
    (EBLL(1.0, code=5, steps=10, warmup=0) + EWC(1.0), NoSparsifier(), "implicit"),
    (MAS(0.1), SLNID(1e-2), "maxout"),
    (RWalk(1.0, every=3), SLNID(1e-2), "implicit"),
    (MAS("auto"), SLNID("auto"), "implicit"),
    (PackNet(0.5, retrain=0.5), SLNID(1e-2), "implicit"),
    (IMM(0.1, drop=0.4), L2Param(1e-2), "explicit"),
    (SGP(0.8, first=0.6, alpha=3.0, samples=999), SLNID(1e-2), "implicit"),  # the inputs of all samples
    (DERpp(0.5, samples=999, batch=999), SLNID(1e-2), "implicit"),  # a memory of all samples, all of which are replayed
]
MORE: list[tuple[Any, Any, str]] = [
    (MAS(0.1), SLNID(1e-2), "explicit"),
    (MAS(0.3, estimator="per-batch"), L1Rep(1e-3), "implicit"),
    (EWC(5.0, mode="per-task"), DeCov(1e-2), "explicit"),
    (MAS(0.1), SparingDeCov(1e-1), "implicit"),
    (EWC(5.0, fisher="exact"), OrthReg(1e-2), "implicit"),
    (SI(1.0), L1Param(1e-3), "explicit"),
    (NoPreserver(), NoSparsifier(), "implicit"),
    (MAS(0.1) + SI(1.0), SLNI(1e-2) + SNI(1e-3), "implicit"),
    (EWC(5.0) + MAS(0.1) + RWalk(0.1), L1Rep(1e-3) + OrthReg(1e-3), "explicit"),
    (PackNet(0.5) + MAS(0.1), SLNID(1e-2), "implicit"),
    (LwF(1.0) + PackNet(0.5), DeCov(1e-2), "implicit"),
    (MAS(0.1) + GPM(0.8, rise=0.05, samples=999), NoSparsifier(), "implicit"),
    (AGSCL(0.3, mu=0.3), SLNID(1e-2), "implicit"),
    (IMM(0.1, drop=0.4) + MAS(0.1), SLNID(1e-2), "implicit"),
    (LwF(1.0), SLNID(1e-2), "implicit"),
    (LwF(20.0), NoSparsifier(), "implicit"),
    (EBLL(20.0, code=4, steps=9), NoSparsifier(), "implicit"),
    (IMM(0.1), SLNID(1e-2), "implicit"),
    (RWalk(1.0, every=1), L1Param(1e-3), "explicit"),
    (LocalMAS(0.01), SLNID(1e-2), "implicit"),
    (LocalMAS(0.01), SLNID(1e-2), "maxout"),
    (OnlineEWC(5.0), SLNID(1e-2), "implicit"),
    (EWC(5.0, alpha="function"), SLNID(1e-2), "implicit"),
    (EWC(5.0, alpha="function", fisher="exact"), SLNID(1e-2), "maxout"),
    (EWC(5.0, alpha="function", estimator="per-batch"), SLNID(1e-2), "explicit"),
    (HAT(0.1, s_max=50.0), SLNID(1e-2), "implicit"),
    (HAT(0.5), L1Param(1e-3), "explicit"),
    (PackNet(0.75, retrain=0.0), L2Param(1e-3), "explicit"),
    (IMM(0.1, merge="mean"), L1Rep(1e-3), "explicit"),
    (IMM(0.1, alpha="function"), SLNID(1e-2), "implicit"),
    (IMM(0.1, merge="mean", alpha="function"), SLNID(1e-2), "implicit"),
    (IMM(0.1, drop=0.4), SLNID(1e-2), "implicit"),
    (LwF(2.0, temperature=1.0, warmup=1), OrthReg(1e-2), "implicit"),
    (EBLL(1.0, drift=1.0, code=5, steps=10), SLNID(1e-2), "implicit"),
]


@pytest.mark.filterwarnings("ignore:.*has negative activations")  # Maxout with the plain SLNID, as the engine has it
@pytest.mark.parametrize(
    ("preserve", "sparsify", "anchor"),
    [*COMMON, *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE)],
    ids=str,
)
def test_the_engine_is_the_keeper_in_a_loop(tasks_npz: str, preserve: Any, sparsify: Any, anchor: Any) -> None:
    run = small(tasks_npz, preserve=preserve, sparsify=sparsify, anchor="implicit" if anchor == "maxout" else anchor)
    if anchor == "maxout":
        run = dataclasses.replace(run, model="mlp-12-maxout")
    compare(run)


@pytest.mark.parametrize(
    ("preserve", "changes"),
    [
        (MAS(0.1), {}),
        (EWC(5.0), {"optimizer": "adamw", "weight_decay": 0.1}),
        (SI(1.0), {"weight_decay": 0.02}),
        (MAS(0.1), {"anchor": "explicit", "momentum": 0.0}),
        (LwF(1.0) + MAS(0.1), {}),
        (PackNet(0.5, retrain=0.5), {"optimizer": "adamw"}),
        (GPM(0.8, samples=999), {"optimizer": "adamw", "weight_decay": 0.1}),
        (HAT(0.75, rate=0.05), {}),
    ],
    ids=str,
)
def test_by_adam_it_is_the_keeper_with_torchs_adam(tasks_npz: str, preserve: Any, changes: dict[str, Any]) -> None:
    compare(small(tasks_npz, **({"preserve": preserve, "optimizer": "adam", "lr": 1e-3} | changes)))


def compare(run: Run) -> None:
    """Train a run by hand and by the engine; compare the two. A distillation of 20 enlarges rounding."""
    rtol = 1e-3 if run.preserve == LwF(20.0) else 1e-4
    model, keeper, rows = by_hand(run)
    learner = Learner([run])
    result = learner.learn()[0]
    for name, p in model.named_parameters():
        assert_close(learner.fleet.params[name][0], p, rtol=rtol, atol=rtol / 10, msg=lambda m, n=name: f"{n}: {m}")
    for state, stacked in zip(keeper.states, learner.fleet.states, strict=True):
        for name, omega in state.get("omega", {}).items():
            assert_close(stacked["omega"][name][0], omega, rtol=1e-3, atol=1e-5)
    for name, alpha in keeper.alpha.items():
        assert_close(learner.fleet.alpha[name][0], alpha, rtol=1e-3, atol=1e-5)
    assert_allclose(result.accuracy, rows, atol=0.026)  # one of forty test images
    assert result.capacity[-1]["free_parameters"] == pytest.approx(keeper.capacity().as_dict()["free_parameters"], abs=0.01)


@pytest.mark.parametrize(
    ("of_the_loss", "model"),
    [
        (EWC(), "mlp-12"),
        (EWC(), "mlp-12-maxout"),
        (EWC(fisher="exact"), "mlp-12-maxout"),
        (EWC(estimator="per-batch"), "mlp-12"),
        (OnlineEWC(mode="online"), "mlp-12-maxout"),
        (IMM(), "mlp-12"),
        (IMM(merge="mean"), "mlp-12-maxout"),
    ],
    ids=str,
)
def test_with_the_functions_alpha_there_is_the_same_omega_and_the_alpha_of_mas(tasks_npz: str, model: str, of_the_loss: Any) -> None:
    """Until the first task has ended the three are trained alike: there is nothing to hold yet."""
    fleets = []
    for preserve in (of_the_loss, dataclasses.replace(of_the_loss, alpha="function"), MAS()):
        learner = Learner([small(tasks_npz, model=model, preserve=preserve, tasks=1, seed=s) for s in range(2)])
        learner.learn()
        fleets.append(learner.fleet)
    plain, function, mas = fleets
    for group in ("omega", "mass"):
        for name, measured in plain.state.get(group, {}).items():
            assert_close(function.state[group][name], measured)
    for name, alpha in mas.alpha.items():
        assert_close(function.alpha[name], alpha)
        assert not torch.allclose(plain.alpha[name], alpha)
