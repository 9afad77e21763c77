"""How long a training will take, as it is estimated while it runs."""

from __future__ import annotations

import pytest

from selfless.engine import progress
from selfless.engine.progress import Pace


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def take(pace: Pace, clock: Clock, steps: int, seconds: float) -> None:
    for _ in range(steps):
        clock.now += seconds
        pace.step()


def test_a_slow_first_step_does_not_count(clock: Clock) -> None:
    """Six seconds to start, then 100 steps a second: of 1,000 steps 900 are left after 100."""
    pace = Pace([100], epochs=10, members=1)
    pace.begin_epoch(0, 0)
    take(pace, clock, 1, 6.0)
    assert pace.seconds_left is None
    assert pace.speed is None
    take(pace, clock, 99, 0.01)
    assert pace.seconds_left == pytest.approx(9.0)
    assert pace.speed == pytest.approx(100, rel=0.02)
    assert pace.share == 0.1


def test_nothing_is_estimated_from_a_few_quick_steps(clock: Clock) -> None:
    pace = Pace([100], epochs=10, members=1)
    take(pace, clock, 10, 0.01)
    assert pace.seconds_left is None
    take(pace, clock, 1, 0.01)
    assert pace.seconds_left == pytest.approx(9.89)


def test_slow_steps_are_enough_if_they_take_seconds(clock: Clock) -> None:
    pace = Pace([10], epochs=1, members=1)
    take(pace, clock, 3, 60.0)
    assert pace.seconds_left == pytest.approx(7 * 60.0)


def test_it_ends_at_0_and_goes_on_from_where_a_run_was_stopped(clock: Clock) -> None:
    pace = Pace([4, 4], epochs=10, members=2)
    pace.place(1, 0)
    assert pace.share == 0.5
    take(pace, clock, 20, 0.1)
    assert pace.seconds_left == pytest.approx(2.0)
    take(pace, clock, 20, 0.1)
    assert pace.seconds_left == 0.0
