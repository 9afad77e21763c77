"""The engine against the keeper in a plain loop: the same parameters, importances and accuracies.

Each method alone, with SLNID and the implicit anchor, is a law of `selfless.testing`; here are the others.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from torch.testing import assert_close

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
)
from selfless.engine.learner import Learner
from selfless.testing import train_in_loop
from tests.engine.small_runs import small

pytestmark = pytest.mark.slow


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
    (EWC(5.0, fisher="exact"), OrthReg(1e-2), "implicit"),
    (SI(1.0), L1Param(1e-3), "explicit"),
    (NoPreserver(), NoSparsifier(), "implicit"),
    (MAS(0.1) + SI(1.0), SLNI(1e-2) + SNI(1e-3), "implicit"),
    (EWC(5.0) + MAS(0.1) + RWalk(0.1), L1Rep(1e-3) + OrthReg(1e-3), "explicit"),
    (PackNet(0.5) + MAS(0.1), SLNID(1e-2), "implicit"),
    (PackNet(0.5, retrain=0.5) + SI(1.0), NoSparsifier(), "implicit"),  # pruning is no step of a path
    (AGSCL(0.1) + SI(1.0), NoSparsifier(), "implicit"),  # a path begins after neurons were restarted
    (LwF(1.0) + PackNet(0.5), DeCov(1e-2), "implicit"),
    (MAS(0.1) + GPM(0.8, rise=0.05, samples=999), NoSparsifier(), "implicit"),
    (IMM(0.1, drop=0.4) + MAS(0.1), SLNID(1e-2), "implicit"),
    (LwF(20.0), NoSparsifier(), "implicit"),
    (EBLL(20.0, code=4, steps=9), NoSparsifier(), "implicit"),
    (RWalk(1.0, every=1), L1Param(1e-3), "explicit"),
    (LocalMAS(0.01), SLNID(1e-2), "maxout"),
    (EWC(5.0, alpha="function", fisher="exact"), SLNID(1e-2), "maxout"),
    (EWC(5.0, alpha="function", estimator="per-batch"), SLNID(1e-2), "explicit"),
    (HAT(0.5), L1Param(1e-3), "explicit"),
    (PackNet(0.75, retrain=0.0), L2Param(1e-3), "explicit"),
    (IMM(0.1, merge="mean"), L1Rep(1e-3), "explicit"),
    (IMM(0.1, merge="mean", alpha="function"), SLNID(1e-2), "implicit"),
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
    made = train_in_loop(run)
    learner = Learner([run])
    result = learner.learn()[0]
    for name, p in made.model.named_parameters():
        assert_close(learner.fleet.params[name][0], p, rtol=rtol, atol=rtol / 10, msg=lambda m, n=name: f"{n}: {m}")
    for state, stacked in zip(made.keeper.states, learner.fleet.states, strict=True):
        for name, omega in state.get("omega", {}).items():
            assert_close(stacked["omega"][name][0], omega, rtol=1e-3, atol=1e-5)
    for name, alpha in made.keeper.alpha.items():
        assert_close(learner.fleet.alpha[name][0], alpha, rtol=1e-3, atol=1e-5)
    assert_allclose(result.accuracy, made.accuracy, atol=0.026)  # one of forty test images
    assert result.capacity[-1]["free_parameters"] == pytest.approx(made.keeper.capacity().as_dict()["free_parameters"], abs=0.01)


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
