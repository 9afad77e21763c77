"""Strength "auto" in fleets: every member has its own, and it is recorded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from numpy.testing import assert_array_equal

from selfless import MAS, SLNID, DeCov
from selfless.engine.learner import Learner
from selfless.engine.progress import Event
from selfless.functional import scale
from selfless.runner.plan import fleets
from tests.engine.small_runs import small


@pytest.fixture(autouse=True)
def _early_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "FIRST_LOOK", 2.0)


@pytest.mark.slow
def test_every_member_has_the_strength_that_it_has_alone(tasks_npz: str) -> None:
    terms = [SLNID("auto"), SLNID("auto", sigma=2.0), SLNID(1e-2), DeCov(1e-2)]
    runs = [small(tasks_npz, preserve=MAS("auto"), sparsify=term, seed=s) for s, term in enumerate(terms)]
    assert len(fleets([dataclasses.replace(run, seed=0) for run in runs])) == 1
    together = Learner(runs).learn()
    for run, result in zip(runs, together, strict=True):
        alone = Learner([run]).learn()[0]
        assert result.about["strengths"] == pytest.approx(alone.about["strengths"], rel=1e-3)
        assert result.accuracy == pytest.approx(alone.accuracy, abs=0.03)
    assert len({result.about["strengths"]["mas"] for result in together}) == len(runs)
    assert together[2].about["strengths"]["slnid"] == pytest.approx(1e-2)


def test_numbers_and_auto_share_no_fleet_of_preservers(tasks_npz: str) -> None:
    assert len(fleets([small(tasks_npz, preserve=MAS("auto")), small(tasks_npz, preserve=MAS(0.1))])) == 2
    assert "strengths" not in Learner([small(tasks_npz, epochs=1, tasks=1)]).learn()[0].about


class Stop(Exception):
    pass


@pytest.mark.usefixtures("every_epoch_saved")
def test_a_run_that_was_stopped_ends_with_the_same_bits(tasks_npz: str, tmp_path: Path) -> None:
    runs = [small(tasks_npz, preserve=MAS("auto"), sparsify=SLNID("auto"), ramp=1, tasks=2, seed=s) for s in range(2)]
    want = Learner(runs).learn()
    events: list[Event] = []

    def stop(event: Event) -> None:
        events.append(event)
        if len(events) in (1, 4):
            raise Stop

    for _ in range(2):
        with pytest.raises(Stop):
            Learner(runs, checkpoint=tmp_path / "fleet.safetensors", report=stop).learn()
    for a, b in zip(want, Learner(runs, checkpoint=tmp_path / "fleet.safetensors").learn(), strict=True):
        assert_array_equal(a.accuracy, b.accuracy)
        assert a.about["strengths"] == b.about["strengths"]
