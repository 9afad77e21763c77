"""The forecast: its line and interval against an oracle, its limits, and what happened."""

from __future__ import annotations

import math

import numpy as np
import pytest

from selfless.capacity import Forecast, forecast
from selfless.capacity.trend import fitted, never_rising
from selfless.metrics import student_quantile


def test_the_slope_and_its_interval_are_those_of_a_regression() -> None:
    rng = np.random.default_rng(0)
    y = 0.9 - 0.01 * np.arange(6) + rng.normal(0, 0.003, (3, 6))
    found = forecast(y, margin=0.1)
    x = np.tile(np.arange(6.0), 3)
    (slope, _), covariance = np.polyfit(x, y.ravel(), 1, cov=True)
    assert found.slope == pytest.approx(slope)
    assert found.slope_high - found.slope == pytest.approx(student_quantile(0.9, 16) * math.sqrt(covariance[0, 0]))
    assert found.low <= found.more <= found.high
    assert found.more == math.floor(1 + 0.1 / -slope) - 6


def test_a_straight_line_is_foretold_exactly() -> None:
    line = [1.0 - 0.01 * t for t in range(20)]
    for after in (3, 5, 8):
        found = forecast(line[:after], margin=0.1)
        assert found.more == found.low == found.high == fitted(line, 0.1, after) == 11 - after
    assert forecast(line[:5], margin=0.02).more == 0


def test_no_loss_has_no_limit() -> None:
    found = forecast([0.9, 0.91, 0.92], margin=0.02)
    assert math.isinf(found.more)
    assert found.as_dict()["more"] is None
    assert str(found) == (
        "Each new task is 1.00 points better than the one before: no sign that room ends within 30 more tasks "
        "(80 % interval; by the accuracy of new tasks alone)."
    )
    assert fitted([0.9, 0.91, 0.92], 0.02, 2) is None


@pytest.mark.parametrize(
    ("slopes", "words"),
    [
        ((-0.01, -0.02, -0.005), "room for 6 more tasks before one is more than 10 points below the first (80 % interval: 1 to 16)."),
        ((-0.01, -0.02, 0.001), "room for 6 more tasks before one is more than 10 points below the first (80 % interval: 1 or more)."),
        ((-1e-5, -0.02, 0.01), "as good as the one before; room for more than 50 tasks before one is more than 10 points below"),
        ((-1 / 61, -0.02, -0.01), "room for 2 more tasks"),
        ((-1 / 52, -0.03, -0.01), "room for 1 more task before"),
        ((-1e-5, -1e-4, 0.01), "as good as the one before: no sign that room ends within 50 more tasks"),
        ((0.15, 0.05, 0.2), "15.00 points better than the one before: no sign that room ends"),
        ((0.15, 0.11, 0.2), "15.00 points better than the one before, so the first tasks were hardly trained or harder: this says nothing"),
    ],
)
def test_a_line_is_not_followed_beyond_ten_times_the_tasks(slopes: tuple[float, float, float], words: str) -> None:
    assert words in str(Forecast(5, *slopes, margin=0.1, level=0.8))


def test_the_interval_covers_as_often_as_it_says() -> None:
    rng, truth, hits = np.random.default_rng(1), -0.01, 0
    for _ in range(400):
        found = forecast(0.9 + truth * np.arange(5) + rng.normal(0, 0.01, 5), margin=0.05)
        hits += found.slope_low <= truth <= found.slope_high
    assert 0.74 < hits / 400 < 0.86


def test_neighbours_that_rise_are_replaced_by_their_mean() -> None:
    assert never_rising(np.array([3.0, 1.0, 2.0, 2.5, 0.0])).tolist() == pytest.approx([3.0, 5.5 / 3, 5.5 / 3, 5.5 / 3, 0.0])
    assert fitted([0.9, 0.7, 0.9, 0.9, 0.5], 0.1, 2) == 2  # one bad task among good ones is no trend


def test_what_cannot_be_foretold_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 3 tasks or more, but there are 2"):
        forecast([0.9, 0.8])
    with pytest.raises(ValueError, match="missing or not finite"):
        forecast([0.9, math.nan, 0.8])
    for margin in (0.0, 5.0):
        with pytest.raises(ValueError, match=r"fractions between 0 and 1, so 0\.05 for 5 points"):
            forecast([0.9, 0.8, 0.8], margin=margin)
    with pytest.raises(ValueError, match="an accuracy is 90; pass fractions from 0 to 1"):
        forecast([90, 80, 80])
    with pytest.raises(ValueError, match="seeds have different numbers of tasks"):
        forecast([[0.9, 0.8, 0.8], [0.9, 0.8]])
