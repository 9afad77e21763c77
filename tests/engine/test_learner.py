"""The engine against the keeper, fleets against single runs, and runs that stop against runs that do not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn
from torch.testing import assert_close

import selfless
from selfless import (
    EBLL,
    EWC,
    HAT,
    IMM,
    MAS,
    SI,
    SLNI,
    SLNID,
    SNI,
    SNID,
    DeCov,
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
)
from selfless.data import stream
from selfless.engine import rng
from selfless.engine.learner import Learner
from selfless.engine.native.forward import inhibited
from selfless.engine.native.options import PairGradient
from selfless.engine.progress import Event
from selfless.models import build
from selfless.preserve.capabilities import Encodes
from selfless.spec import Result
from selfless.terms import add


def small(data: str, **changes: Any) -> Run:
    base = {"stream": data, "model": "mlp-12", "preserve": MAS(0.1), "sparsify": SLNID(1e-2), "epochs": 2, "batch": 50, "lr": 0.05}
    return Run(**(base | changes))


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


def by_hand(run: Run) -> tuple[nn.Module, selfless.Keeper, list[list[float]]]:
    """The same run as an engineer would write it: a plain loop with `attach`."""
    tasks = stream(run.stream, seed=run.seed)
    model = build(run.model, outputs=tasks.outputs, input_shape=tasks.input_shape, seed=run.seed)
    keeper = selfless.attach(model, run.preserve, run.sparsify, layers=list(model.hidden))
    own_rows(keeper, [task.heads[0] for task in tasks.tasks])
    rows = []
    for t, task in enumerate(tasks.tasks):
        data, head = task.train.resident(), slice(task.heads[0].start, task.heads[0].stop)
        opt = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=run.momentum)
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


@pytest.mark.parametrize(
    ("preserve", "sparsify", "anchor"),
    [
        (MAS(0.1), SLNID(1e-2), "implicit"),
        (MAS(0.1), SLNID(1e-2), "explicit"),
        (MAS(0.3, estimator="per-batch"), L1Rep(1e-3), "implicit"),
        (EWC(5.0), SNID(1e-2, discount="max"), "implicit"),
        (EWC(5.0, mode="per-task"), DeCov(1e-2), "explicit"),
        (EWC(5.0, fisher="exact"), OrthReg(1e-2), "implicit"),
        (SI(1.0), SLNI(1e-2), "implicit"),
        (SI(1.0), L1Param(1e-3), "explicit"),
        (NoPreserver(), NoSparsifier(), "implicit"),
        (LwF(1.0) + MAS(0.1), SLNID(1e-2) + DeCov(1e-2), "implicit"),
        (MAS(0.1) + SI(1.0), SLNI(1e-2) + SNI(1e-3), "implicit"),
        (EWC(5.0) + MAS(0.1) + RWalk(0.1), L1Rep(1e-3) + OrthReg(1e-3), "explicit"),
        (PackNet(0.5) + MAS(0.1), SLNID(1e-2), "implicit"),
        (LwF(1.0) + PackNet(0.5), DeCov(1e-2), "implicit"),
        (HAT(0.75) + SI(0.1), SLNID(1e-2), "implicit"),
        (EBLL(1.0, code=5, steps=10, warmup=0) + EWC(1.0), NoSparsifier(), "implicit"),
        (IMM(0.1, drop=0.4) + MAS(0.1), SLNID(1e-2), "implicit"),
        (MAS(0.1), SLNID(1e-2), "maxout"),
        (LwF(1.0), SLNID(1e-2), "implicit"),
        (IMM(0.1), SLNID(1e-2), "implicit"),
        (RWalk(1.0, every=3), SLNID(1e-2), "implicit"),
        (RWalk(1.0, every=1), L1Param(1e-3), "explicit"),
        (LocalMAS(0.01), SLNID(1e-2), "implicit"),
        (LocalMAS(0.01), SLNID(1e-2), "maxout"),
        (OnlineEWC(5.0), SLNID(1e-2), "implicit"),
        (EWC(5.0, alpha="function"), SLNID(1e-2), "implicit"),
        (EWC(5.0, alpha="function", fisher="exact"), SLNID(1e-2), "maxout"),
        (EWC(5.0, alpha="function", estimator="per-batch"), SLNID(1e-2), "explicit"),
        (PackNet(0.5, retrain=0.5), SLNID(1e-2), "implicit"),
        (HAT(0.1, s_max=50.0), SLNID(1e-2), "implicit"),
        (HAT(0.5), L1Param(1e-3), "explicit"),
        (PackNet(0.75, retrain=0.0), L2Param(1e-3), "explicit"),
        (IMM(0.1, merge="mean"), L1Rep(1e-3), "explicit"),
        (IMM(0.1, alpha="function"), SLNID(1e-2), "implicit"),
        (IMM(0.1, merge="mean", alpha="function"), SLNID(1e-2), "implicit"),
        (IMM(0.1, drop=0.4), SLNID(1e-2), "implicit"),
        (IMM(0.1, drop=0.4), L2Param(1e-2), "explicit"),
        (LwF(2.0, temperature=1.0, warmup=1), OrthReg(1e-2), "implicit"),
        (EBLL(1.0, drift=1.0, code=5, steps=10), SLNID(1e-2), "implicit"),
    ],
    ids=str,
)
def test_the_engine_is_the_keeper_in_a_loop(tasks_npz: str, preserve: Any, sparsify: Any, anchor: Any) -> None:
    run = small(tasks_npz, preserve=preserve, sparsify=sparsify, anchor="implicit" if anchor == "maxout" else anchor)
    if anchor == "maxout":
        run = dataclasses.replace(run, model="mlp-12-maxout")
    model, keeper, rows = by_hand(run)
    learner = Learner([run])
    result = learner.learn()[0]
    for name, p in model.named_parameters():
        assert_close(learner.fleet.params[name][0], p, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for state, stacked in zip(keeper.states, learner.fleet.states, strict=True):
        for name, omega in state.get("omega", {}).items():
            assert_close(stacked["omega"][name][0], omega, rtol=1e-3, atol=1e-5)
    for name, alpha in keeper.alpha.items():
        assert_close(learner.fleet.alpha[name][0], alpha, rtol=1e-3, atol=1e-5)
    assert_allclose(result.accuracy, rows, atol=0.026)  # one of forty test images
    assert result.capacity[-1]["free_parameters"] == pytest.approx(keeper.capacity().as_dict()["free_parameters"], abs=0.01)


@pytest.mark.parametrize(
    "of_the_loss",
    [EWC(), EWC(fisher="exact"), EWC(estimator="per-batch"), OnlineEWC(mode="online"), IMM(), IMM(merge="mean")],
    ids=str,
)
@pytest.mark.parametrize("model", ["mlp-12", "mlp-12-maxout"])
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


def test_learning_happens(tasks_npz: str) -> None:
    result = Learner([small(tasks_npz, epochs=6)]).learn()[0]
    assert result.accuracy.shape == (3, 3)
    assert np.diag(result.accuracy).min() > 0.85
    assert 0.2 < result.baseline.mean() < 0.8
    assert result.history[2][-1]["loss"] < result.history[2][0]["loss"]
    assert result.summary()["average"] == pytest.approx(result.accuracy[-1].mean())


KINDS = [
    NoSparsifier(),
    SNI(1e-2),
    SNID(1e-2),
    SLNI(1e-2),
    SLNID(2e-2),
    L1Rep(1e-3),
    DeCov(1e-2),
    L1Param(1e-3),
    L2Param(1e-3),
    OrthReg(1e-3),
    SLNID(1e-2) + DeCov(1e-2),
]


def stronger(term: Any, factor: float) -> Any:
    """A preserver with its strengths times a factor, where the members of a fleet may differ in them."""
    return add([part if part.same_strength else dataclasses.replace(part, strength=part.strength * factor) for part in term.parts])


@pytest.mark.parametrize(
    "preserve",
    [
        MAS(0.2),
        EWC(3.0),
        SI(0.5),
        MAS(0.1, estimator="per-batch"),
        LwF(0.5),
        EBLL(0.5, drift=1.0, code=5, steps=10),
        IMM(0.1),
        IMM(0.1, drop=0.4),
        PackNet(0.5),
        RWalk(1.0),
        LocalMAS(0.01),
        HAT(),
        LwF(0.5) + MAS(0.2),
        MAS(0.2) + PackNet(0.5),
    ],
    ids=str,
)
def test_a_member_of_a_fleet_is_the_run_alone(tasks_npz: str, preserve: Any) -> None:
    """Other seeds, strengths, rates and sparsifiers beside it change nothing."""
    runs = [
        small(
            tasks_npz,
            epochs=1,
            seed=i % 3,
            lr=0.02 + 0.01 * i,
            sparsify=kind,
            preserve=stronger(preserve, 1 + i),
        )
        for i, kind in enumerate(KINDS)
    ]
    learner = Learner(runs)
    together = learner.learn()
    for m in (0, 4, 6, 9, 10):
        alone = Learner([runs[m]])
        result = alone.learn()[0]
        for name, p in alone.fleet.params.items():
            assert_close(learner.fleet.params[name][m], p[0], rtol=1e-3, atol=1e-4)
        assert_allclose(together[m].accuracy, result.accuracy, atol=0.026)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_members_may_differ_in_sigma_and_in_epochs(tasks_npz: str, schedule: Any) -> None:
    """Wide enough (150) that inhibition goes by factors, whose number depends on σ; a member that is done waits unchanged."""
    kinds = [SLNID(2e-2), SLNID(2e-2, sigma=40.0), SNI(1e-2), NoSparsifier(), SLNI(1e-2, absolute=True)]
    runs = [small(tasks_npz, model="mlp-150", schedule=schedule, sparsify=k, epochs=1 + i % 3, seed=i) for i, k in enumerate(kinds)]
    learner = Learner(runs)
    together = learner.learn()
    for m, run in enumerate(runs):
        alone = Learner([run])
        result = alone.learn()[0]
        assert [len(epochs) for epochs in together[m].history] == [run.epochs] * 3
        assert_allclose([e[-1]["loss"] for e in together[m].history], [e[-1]["loss"] for e in result.history], rtol=1e-2)
        for name, p in alone.fleet.params.items():
            assert_close(learner.fleet.params[name][m], p[0], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_precision_is_the_runs_own(tasks_npz: str, precision: Any) -> None:
    """bf16 products where the CPU has them, and afterwards everything as it was; float32 stays float32 whatever was set before."""
    seen: list[str] = []
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        run = small(tasks_npz, epochs=6, precision=precision)
        result = Learner([run], report=lambda event: seen.append(torch.get_float32_matmul_precision())).learn()[0]
        assert set(seen) == {"medium" if precision == "bf16" else "highest"}
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert result.accuracy.diagonal().min() > 0.8


def test_convolutions_and_batch_norm_in_a_fleet(tasks_npz: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mynets.py").write_text(
        "from torch import nn\n"
        "def plain(outputs, input_shape):\n"
        "    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, outputs))\n"
        "def normed(outputs, input_shape):\n"
        "    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(),\n"
        "                         nn.Linear(8, outputs))\n"
    )
    monkeypatch.chdir(tmp_path)
    for model in ("mynets:plain", "mynets:normed"):
        runs = [small(tasks_npz, model=model, epochs=1, seed=s, layers="all") for s in range(2)]
        learner = Learner(runs)
        together = learner.learn()
        for m, run in enumerate(runs):
            alone = Learner([run])
            assert_allclose(alone.learn()[0].accuracy, together[m].accuracy, atol=0.026)
            for name, omega in alone.fleet.state["omega"].items():
                assert_close(learner.fleet.state["omega"][name][m], omega[0], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_inhibit_each_other_at_every_position(dtype: torch.dtype) -> None:
    """Σ over positions of hᵀSh, every position a sample; in bf16 to its precision."""
    gen = torch.Generator().manual_seed(0)
    h, pairs = torch.randn(2, 3, 4, 5, 5, generator=gen).relu().to(dtype), torch.rand(2, 4, 4, generator=gen)
    x = h.clone().requires_grad_()
    inhibited(x, [PairGradient(matrix=pairs)]).sum().backward()
    assert x.grad is not None
    want = 1 + torch.einsum("fbchw,fcd->fbdhw", h.float(), pairs) / (3 * 25)
    assert_close(x.grad.float(), want, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=0)


def test_joint_training_and_shared_heads(tasks_npz: str) -> None:
    run = small(f"joint-{tasks_npz}", preserve=NoPreserver(), sparsify=NoSparsifier(), epochs=20)
    result = Learner([run]).learn()[0]
    assert result.accuracy.shape == (1, 3)
    assert result.accuracy.min() > 0.85


# -------------------------------------------------------------------------------------------------- selection and schedules
def test_selection_keeps_the_best_epoch(tasks_npz: str) -> None:
    for select, part in (("held-out", "held_out"), ("best-on-test", "test")):
        run = small(tasks_npz, select=select, epochs=5, lr=0.2, sparsify=NoSparsifier(), preserve=NoPreserver(), tasks=1)
        assert run.held_out == (0.1 if select == "held-out" else 0.0)
        result = Learner([run]).learn()[0]
        scores = [epoch[part] for epoch in result.history[0]]
        if select == "best-on-test":
            assert result.accuracy[0, 0] == pytest.approx(max(scores))
        assert len(scores) == 5


def test_what_was_kept_aside_is_judged_after_every_task(tasks_npz: str) -> None:
    """held_out[t, u] against the trained network itself, and against the scores of the epochs; absent where nothing was kept aside."""
    learner = Learner([small(tasks_npz, held_out=0.2, seed=s) for s in range(2)])
    for m, result in enumerate(learner.learn()):
        assert result.held_out is not None
        assert result.held_out.shape == (3, 3)
        assert_allclose(result.held_out.diagonal(), [task[-1]["held_out"] for task in result.history])
        tasks = stream(tasks_npz, seed=m, held_out=0.2).tasks
        model = build("mlp-12", outputs=6, input_shape=(1, 6, 6))
        model.load_state_dict({n: p[m] for n, p in learner.fleet.params.items()})
        for u, task in enumerate(tasks):
            assert task.held_out is not None
            x, y = task.held_out.resident().batch(torch.arange(len(task.held_out)))
            hits = model(x)[:, 2 * u : 2 * u + 2].argmax(1) == y - 2 * u
            assert result.held_out[-1, u] == pytest.approx(hits.double().mean().item())
        again = Result.from_dict(json.loads(json.dumps(result.as_dict())))
        assert again.held_out is not None
        assert_array_equal(again.held_out, result.held_out)
        older = {k: v for k, v in result.as_dict().items() if k != "held_out"}
        assert Result.from_dict(older).held_out is None
    assert Learner([small(tasks_npz, tasks=1)]).learn()[0].held_out is None
    joint = Learner([small(f"joint-{tasks_npz}", held_out=0.2, preserve=NoPreserver(), sparsify=NoSparsifier())]).learn()[0]
    assert joint.held_out is not None
    assert joint.held_out.shape == (1, 3)


def test_schedules(tasks_npz: str) -> None:
    cosine = Learner([small(tasks_npz, schedule="cosine", epochs=3, tasks=1)])
    cosine.learn()
    assert cosine.fleet.lr.item() < 0.05 * 0.2
    plateau = Learner([small(tasks_npz, schedule="plateau", epochs=40, tasks=1, lr=0.3)])
    result = plateau.learn()[0]
    assert len(result.history[0]) < 40  # stopped after ten stalled epochs
    assert plateau.fleet.lr.item() == 0.0


def test_augmentation_is_a_members_own(tasks_npz: str) -> None:
    runs = [small(tasks_npz, augment="crop-flip", epochs=1, seed=s) for s in range(3)]
    fleet, alone = Learner(runs), Learner(runs[1:2])
    fleet.learn()
    alone.learn()
    for name, p in alone.fleet.params.items():
        assert_close(fleet.fleet.params[name][1], p[0], rtol=1e-3, atol=1e-4)


def test_a_diverging_member_fails_alone(tasks_npz: str) -> None:
    runs = [small(tasks_npz, lr=lr, sparsify=NoSparsifier(), preserve=NoPreserver()) for lr in (0.05, 1e30, 0.05)]
    good, bad, _ = Learner(runs).learn()
    assert good.status == "done"
    assert bad.status == "failed"
    assert "not finite in epoch" in bad.error
    assert_allclose(good.accuracy, Learner(runs[:1]).learn()[0].accuracy, atol=0.026)


# ---------------------------------------------------------------------------------------------------------------- stopping
class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"select": "held-out", "schedule": "cosine"},
        {"schedule": "plateau"},
        {"preserve": SI(1.0)},
        {"preserve": LwF(1.0, warmup=1)},
        {"preserve": EBLL(1.0, steps=10)},
        {"preserve": IMM(0.1)},
        {"preserve": IMM(0.1, drop=0.3)},
        {"preserve": RWalk(1.0)},
        {"preserve": HAT(0.1)},
        {"preserve": PackNet(0.5, retrain=0.5)},
        {"preserve": PackNet(0.5, retrain=0.5), "select": "held-out"},
        {"model": "mlp-12-lwta"},
    ],
    ids=str,
)
def test_a_stopped_run_ends_with_the_same_bits(tasks_npz: str, tmp_path: Path, after: int, change: dict[str, Any]) -> None:
    runs = [small(tasks_npz, seed=s, **change) for s in range(2 if after % 2 else 1)]
    whole = Learner(runs)
    want = whole.learn()
    file = tmp_path / "state.safetensors"
    count = 0

    def stop(event: Event) -> None:
        nonlocal count
        count += 1
        if count == after:
            raise Stop

    with pytest.raises(Stop):
        Learner(runs, checkpoint=file, report=stop).learn()
    again = Learner(runs, checkpoint=file)
    assert again.resumed
    got = again.learn()
    for a, b in zip(got, want, strict=True):
        assert_array_equal(a.accuracy, b.accuracy)
        assert a.as_dict()["held_out"] == b.as_dict()["held_out"]
        assert a.history == b.history
        assert a.capacity == b.capacity
    for name, p in whole.fleet.tensors().items():
        assert torch.equal(again.fleet.tensors()[name], p), name


# ------------------------------------------------------------------------------------------------------------------- draws
def test_draws_are_fixed_and_even() -> None:
    key = rng.stream_key(torch.arange(4), "order", 1, 2)
    order = rng.order(key, 1000)
    assert order[0, :5].tolist() == PINNED
    assert (order.sort(1).values == torch.arange(1000)).all()
    assert (rng.order(key[2:3], 1000)[0] == order[2]).all()
    u = rng.uniform(rng.stream_key(torch.arange(64), "noise"), 4096)
    assert abs(u.mean().item() - 0.5) < 2e-3
    assert abs(u.var().item() - 1 / 12) < 1e-3
    assert np.abs(np.corrcoef(u[:16].numpy()) - np.eye(16)).max() < 0.08
    weights = torch.tensor([[0.0, 1.0, 3.0]]).repeat(4, 1).repeat_interleave(100, 1)
    drawn = rng.order(key, 300, weights)
    assert (drawn >= 100).all()
    assert 0.6 < (drawn >= 200).float().mean() < 0.9


PINNED = [294, 846, 360, 19, 321]


@pytest.mark.parametrize("sparsify", [NoSparsifier(), SLNID(1e-3), L2Param(1e-3)], ids=str)
@pytest.mark.parametrize("head", ["own", "shared"])
@pytest.mark.parametrize("preserve", [PackNet(0.6), HAT(0.1, s_max=50.0)], ids=str)
def test_packnet_and_hat_lose_nothing_of_old_tasks(tasks_npz: str, preserve: Any, sparsify: Any, head: str) -> None:
    """Accuracy on a task never changes after it was learnt, in a fleet, with weight decay, own heads and shared; capacity only falls."""
    more: dict[str, Any] = {"epochs": 6, "batch": 10, "weight_decay": 1e-3, "model": "mlp-24", "stream_options": {"head": head}}
    runs = [small(tasks_npz, preserve=preserve, sparsify=sparsify, seed=s, **more) for s in range(2)]
    for result in Learner(runs).learn():
        for u in range(3):
            assert (result.accuracy[u:, u] == result.accuracy[u, u]).all()
        assert result.summary()["backward_transfer"] == 0.0
        free = [c["free_parameters"] for c in result.capacity]
        assert free[0] >= free[1] >= free[2] >= 0
        assert 1 > free[0] > free[2]
        assert result.accuracy.diagonal().mean() > (0.7 if head == "own" else 0.3)  # one head, other classes: few steps for that


@pytest.mark.parametrize(
    "preserve", [LwF(0.5), EBLL(0.5, steps=10), IMM(0.1, drop=0.3), PackNet(0.5), HAT(0.1, s_max=50.0), LocalMAS(0.01)], ids=str
)
def test_the_rivals_in_a_fleet_of_anybodys_module(tasks_npz: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, preserve: Any) -> None:
    """A module with a forward of its own, convolutions and all: mapped by vmap in a fleet, run as it is alone."""
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, outputs):\n"
        "        super().__init__()\n"
        "        self.conv, self.act1, self.fc = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Linear(64, 8)\n"
        "        self.act2, self.head = nn.ReLU(), nn.Linear(8, outputs)\n"
        "    def forward(self, x):\n"
        "        return self.head(self.act2(self.fc(self.act1(self.conv(x)).flatten(1))))\n"
        "def build(outputs, input_shape):\n"
        "    return Net(outputs)\n"
    )
    monkeypatch.chdir(tmp_path)
    runs = [small(tasks_npz, model="mine:build", preserve=preserve, seed=s, tasks=2) for s in range(2)]
    learner = Learner(runs)
    assert not learner.fleet.stack.native
    together = learner.learn()
    for m, run in enumerate(runs):
        alone = Learner([run])
        assert_allclose(alone.learn()[0].accuracy, together[m].accuracy, atol=0.026)
        for name, p in alone.fleet.params.items():
            assert_close(learner.fleet.params[name][m], p[0], rtol=1e-3, atol=1e-4)


UNUSUAL = """
from torch import nn
from selfless.activations import LWTA, Maxout
def maps(outputs, input_shape):
    net = nn.Sequential(nn.Conv2d(1, 8, 3), Maxout(2), nn.Conv2d(4, 6, 3), LWTA(2), nn.Flatten(), nn.Linear(24, outputs))
    net.hidden, net.hidden_conv = (), ("1", "3")
    return net
def frozen(outputs, input_shape):
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, outputs))
    net[1].weight.requires_grad_(False)
    return net
def named_linear(outputs, input_shape):
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, outputs))
    net.hidden = ("1",)
    return net
def positions(outputs, input_shape):
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Flatten(), nn.Linear(30, outputs))
"""


def test_unusual_networks_of_ones_own(tasks_npz: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "unusual.py").write_text(UNUSUAL)
    monkeypatch.chdir(tmp_path)
    for name, change in (("maps", {"layers": "all"}), ("frozen", {"sparsify": OrthReg(1e-2)})):
        runs = [small(tasks_npz, model=f"unusual:{name}", epochs=1, seed=s, **change) for s in range(2)]
        learner = Learner(runs)
        learner.learn()
        alone = Learner([runs[1]])
        alone.learn()
        for key, p in alone.fleet.params.items():
            assert_close(learner.fleet.params[key][1], p[0], rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="hidden names '1', a Linear; it must name activation modules"):
        Learner([small(tasks_npz, model="unusual:named_linear")])
    with pytest.raises(ValueError, match=r"layer '1' gives \(1, 1, 6, 5\) from a Linear: .* flatten the positions"):
        Learner([small(tasks_npz, model="unusual:positions")]).learn()


def test_a_member_that_has_stopped_records_nothing_more(tasks_npz: str) -> None:
    runs = [small(tasks_npz, schedule="plateau", epochs=16, lr=lr) for lr in (0.0, 0.05)]
    together, alone = Learner(runs).learn()[0], Learner(runs[:1]).learn()[0]
    assert [len(task) for task in together.history] == [len(task) for task in alone.history] == [11, 11, 11]


def test_a_run_that_blows_up_in_its_last_step_has_failed(tasks_npz: str) -> None:
    result = Learner([small(tasks_npz, tasks=1, epochs=1, batch=130, lr=1e18)]).learn()[0]
    assert result.status == "failed"
    assert "not finite after task 1" in result.error


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("sparsify", [SLNID(0.05), L1Rep(0.05)], ids=str)
def test_a_ramp_begins_at_nothing_and_ends_at_the_strength(
    tasks_npz: str, monkeypatch: pytest.MonkeyPatch, sparsify: Any, schedule: str
) -> None:
    """Over two epochs of three λ is 0, λ/2, λ, in every task; members have each their own."""
    at_once = small(tasks_npz, sparsify=sparsify, epochs=3, schedule=schedule)
    learner = Learner([dataclasses.replace(at_once, ramp=2), at_once])
    fleet, begin = learner.fleet, learner.fleet.begin_epoch
    seen: list[tuple[list[float], list[float]]] = []

    def watched(task: int, epoch: int) -> None:
        begin(task, epoch)
        seen.append((fleet.rates.sparsify[0].tolist(), fleet.rates.lr_lambda[0].tolist()))

    monkeypatch.setattr(fleet, "begin_epoch", watched)
    together = learner.learn()
    strength = sparsify.strength
    for t in range(3):
        assert_allclose([now[0] for now, _ in seen[3 * t : 3 * t + 3]], [0.0, strength / 2, strength], rtol=1e-6)
        assert_allclose([now[1] for now, _ in seen[3 * t : 3 * t + 3]], strength, rtol=1e-6)
        assert seen[3 * t][1][0] == 0.0
    for m, run in enumerate(learner.runs):
        assert_allclose(Learner([run]).learn()[0].accuracy, together[m].accuracy, atol=0.026)


def test_a_ramp_is_part_of_a_run_that_has_one(tasks_npz: str) -> None:
    plain = small(tasks_npz)
    assert "ramp" not in plain.as_dict()
    assert plain.key == small(tasks_npz, ramp=0).key != small(tasks_npz, ramp=1).key
    assert Run.from_dict(small(tasks_npz, ramp=1).as_dict()) == small(tasks_npz, ramp=1)
    for wrong in (-1, 0.5, True):
        with pytest.raises(ValueError, match=r"ramp is .*; it must be a whole number ≥ 0"):
            small(tasks_npz, ramp=wrong)
    with pytest.raises(ValueError, match="ramp is 2 of 2 epochs"):
        small(tasks_npz, epochs=2, ramp=2)
