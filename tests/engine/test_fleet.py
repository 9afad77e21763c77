"""A member of a fleet is the run alone, whatever is trained beside it."""

from __future__ import annotations

from typing import Any

import pytest
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
    L1Param,
    L1Rep,
    L2Param,
    LocalMAS,
    LwF,
    NoPreserver,
    NoSparsifier,
    OrthReg,
    PackNet,
    RWalk,
)
from selfless.engine.learner import Learner
from selfless.functional import scale
from selfless.terms import add
from tests.engine.small_runs import small

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


def weaker(term: Any, i: int) -> Any:
    """A preserver with its strength divided by 1 + i, where the members of a fleet may differ in it; the next part of a sum by 1 + 2i."""
    parts = enumerate(term.parts, 1)
    return add([part if part.same_strength else part.with_strength(part.strength / (1 + k * i)) for k, part in parts])


PRESERVERS = [
    MAS(0.2),
    EWC(3.0),
    SI(0.5),
    MAS(0.1, estimator="per-batch"),
    LwF(0.5),
    EBLL(0.5, drift=1.0, code=5, steps=10),
    IMM(0.1),
    IMM(0.1, drop=0.4),
    PackNet(0.5),
    GPM(0.8, samples=30),
    AGSCL(0.3, mu=0.3),
    RWalk(1.0),
    LocalMAS(0.01),
    HAT(),
    LwF(0.5) + MAS(0.2),
    MAS(0.2) + PackNet(0.5),
    LwF(0.5) + SGP(0.8, samples=30),
    SI(0.5) + EWC(3.0),
    MAS(0.2) + HAT(),
    LwF(0.5) + IMM(0.1, drop=0.4),
]


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(PRESERVERS)), ids=lambda place: str(PRESERVERS[place]))
def test_a_member_of_a_fleet_is_the_run_alone(tasks_npz: str, place: int) -> None:
    """Other seeds, strengths, rates and sparsifiers beside it change nothing. One member of each fleet is trained alone, others in turn:
    every sparsifier is, with one preserver or two. Every second sparsifier is in a fleet."""
    preserve = PRESERVERS[place]
    runs = [
        small(
            tasks_npz,
            epochs=1,
            seed=i % 3,
            lr=0.02 + 0.01 * i,
            sparsify=kind,
            preserve=weaker(preserve, i),
        )
        for i, kind in list(enumerate(KINDS))[place % 2 :: 2]
    ]
    learner = Learner(runs)
    together = learner.learn()
    m = place // 2 % len(runs)
    alone = Learner([runs[m]])
    result = alone.learn()[0]
    for name, p in alone.fleet.params.items():
        assert_close(learner.fleet.params[name][m], p[0], rtol=1e-3, atol=1e-4)
    assert_allclose(together[m].accuracy, result.accuracy, atol=0.026)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["constant", "cosine", "step"])
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preserve", "sparsify", "schedule", "epochs"),
    [
        (MAS(0.1), SLNID("auto"), "constant", (2, 9)),
        (MAS("auto"), SLNID("auto"), "cosine", (2, 9)),
        (RWalk(1.0), NoSparsifier(), "constant", (8, 24)),
    ],
    ids=str,
)
def test_what_a_member_measures_in_its_steps_ends_with_them(
    tasks_npz: str, monkeypatch: pytest.MonkeyPatch, preserve: Any, sparsify: Any, schedule: Any, epochs: tuple[int, int]
) -> None:
    """Other members train on; a λ from the size of its term, or an average over its gradients, must not follow them."""
    monkeypatch.setattr(scale, "FIRST_LOOK", 2.0)
    runs = [small(tasks_npz, preserve=preserve, sparsify=sparsify, schedule=schedule, epochs=e, seed=e) for e in epochs]
    learner, alone = Learner(runs), Learner(runs[:1])
    together, result = learner.learn()[0], alone.learn()[0]
    if "strengths" in result.about:
        assert together.about["strengths"] == pytest.approx(result.about["strengths"], rel=1e-3)
    for name, omega in alone.fleet.states[0]["omega"].items():
        assert_close(learner.fleet.states[0]["omega"][name][0], omega[0], rtol=1e-3, atol=1e-5)
    assert [set(entry) for task in together.history for entry in task] == [set(entry) for task in result.history for entry in task]


def test_the_penalties_of_other_members_are_not_in_a_record(tasks_npz: str) -> None:
    runs = [small(tasks_npz, sparsify=kind, preserve=MAS(0.1), epochs=1) for kind in (NoSparsifier(), SLNID(1e-2))]
    plain, inhibited = Learner(runs).learn()
    assert {name for task in plain.history for entry in task for name in entry} == {"loss", "accuracy", "anchor"}
    assert "inhibition" in inhibited.history[0][0]


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
    assert "not finite in epoch 1 of task 1 (" in bad.error
    assert "), from step 2 of 3 on, first in the output of layer 'fc2'; use" in bad.error  # 1e30 times a gradient overflows
    assert bad.error.endswith("; use a learning rate below 1e+30")
    assert_allclose(good.accuracy, Learner(runs[:1]).learn()[0].accuracy, atol=0.026)


@pytest.mark.slow
def test_a_member_that_has_stopped_records_nothing_more(tasks_npz: str) -> None:
    runs = [small(tasks_npz, schedule="plateau", epochs=16, lr=lr) for lr in (0.0, 0.05)]
    together, alone = Learner(runs).learn()[0], Learner(runs[:1]).learn()[0]
    assert [len(task) for task in together.history] == [len(task) for task in alone.history] == [11, 11, 11]
