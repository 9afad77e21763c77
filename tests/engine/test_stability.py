"""Distillation at strengths from 0 to 10⁶: nothing becomes infinite, and the newest task is always learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from selfless import EBLL, LwF, NoSparsifier
from selfless.engine.learner import Learner
from tests.engine.small_runs import small

STRENGTHS = (0.0, 1.0, 1e2, 1e4, 1e6)


def last_accuracies(data: str, preserver: Any, **options: Any) -> list[float]:
    """The accuracy on the last task, right after it, at every strength."""
    terms = [preserver(strength, **options) for strength in STRENGTHS]
    results = Learner([small(data, preserve=term, sparsify=NoSparsifier(), epochs=4, batch=10) for term in terms]).learn()
    assert all(np.isfinite(result.accuracy).all() and result.status == "done" for result in results)
    return [float(result.accuracy[-1][-1]) for result in results]


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("preserver", [LwF, pytest.param(EBLL, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_no_strength_breaks_distillation(tasks_npz: str, preserver: Any, warmup: int) -> None:
    options = {"code": 4, "steps": 9} if preserver is EBLL else {}
    assert min(last_accuracies(tasks_npz, preserver, warmup=warmup, **options)) >= 0.9


def test_without_damping_a_large_strength_breaks_it(tasks_npz: str) -> None:
    """This is what the damping is for; if this test fails, the one above shows nothing."""
    assert last_accuracies(tasks_npz, LwF, damped=False)[2] < 0.6
