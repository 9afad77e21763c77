"""Schedules that follow held-out data."""

from __future__ import annotations

import numpy as np
import pytest

from selfless import LwF, NoPreserver, NoSparsifier
from selfless.engine.learner import Learner
from selfless.engine.plateaus import STOP, lower
from tests.engine.small_runs import small


def halved(losses: list[float], lr: float) -> list[float]:
    """The rate of every epoch, as the loop of Saha et al. has it: patience 6, factor 2, an end below lr/1000."""
    best, patience, rates, least = np.inf, 6, [], lr / 1000
    for loss in losses:
        rates.append(lr)
        if loss < best:
            best, patience = loss, 6
            continue
        patience -= 1
        if patience <= 0:
            lr /= 2
            if lr < least:
                break
            patience = 6
    return rates


@pytest.mark.parametrize("seed", range(3))
def test_halving_is_the_loop_with_patience(seed: int) -> None:
    draw = np.random.default_rng(seed)
    losses = [float(x) for x in 1 / (1 + np.arange(150) / 9) + draw.uniform(0, 0.3, 150)]
    best, stalled, rate, rates = np.inf, [0], 0.05, list[float]()
    for loss in losses:
        rates.append(rate)
        stalled, (factor,) = lower("halving", stalled, [loss < best], [rate / 0.05])
        best, rate = min(best, loss), rate * factor
        if stalled[0] >= STOP:
            break
    assert rates == pytest.approx(halved(losses, 0.05))
    assert len(rates) < 150
    assert lower("halving", stalled, [True], [0.0]) == ([STOP], [0.0])  # a member that has stopped stays so


def test_a_run_halves_its_rate_and_keeps_the_epoch_with_the_lowest_held_out_loss(tasks_npz: str) -> None:
    run = small(
        tasks_npz, schedule="halving", select="held-out", epochs=30, tasks=1, lr=0.5, preserve=NoPreserver(), sparsify=NoSparsifier()
    )
    learner = Learner([run])
    result = learner.learn()[0]
    assert run.held_out == 0.1
    losses = [epoch["held_out_loss"] for epoch in result.history[0]]
    assert learner.fleet.lr.item() == pytest.approx(halved([*losses, np.inf], 0.5)[-1])
    data = learner.load([learner.streams[0].tasks[0].held_out])
    assert learner.fleet.evaluate_loss(data, learner.streams[0].tasks[0].columns)[0] == pytest.approx(min(losses))


@pytest.mark.slow
def test_a_member_that_has_stopped_keeps_its_curvature_while_others_train(tasks_npz: str) -> None:
    """The damping of its next task does not depend on how long the others train."""
    settings = {"schedule": "plateau", "select": "held-out", "epochs": 15, "tasks": 2, "preserve": LwF(1.0), "sparsify": NoSparsifier()}
    runs = [small(tasks_npz, lr=lr, seed=seed, **settings) for seed, lr in enumerate((0.5, 0.005))]
    together, alone = Learner(runs), Learner(runs[:1])
    found, (wanted,) = together.learn(), alone.learn()
    assert len(found[0].history[1]) == len(wanted.history[1]) < len(found[1].history[1])
    assert together.fleet.state["curvature"]["largest"][0] == pytest.approx(alone.fleet.state["curvature"]["largest"].item(), rel=1e-3)
