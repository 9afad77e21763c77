"""A forecast: how many more tasks of this kind fit before a new task loses more than a margin.

    y_t = a + b (t − 1) + noise,   y_t the accuracy on task t just after learning it (the diagonal of the accuracy matrix)

    a new task t loses −b (t − 1); it is within the margin m while t ≤ 1 + m / −b, so that  k = ⌊1 + m / −b⌋ − n  more fit after n tasks.

b is the least-squares slope over all tasks and seeds, and its interval is Student's: b ± q s / √Σ(t − t̄)²; that of k follows from it.
It is a straight line: it says how the trend goes on, not when it breaks. Tasks that differ in difficulty widen the interval; subtract from
each accuracy what the task reaches alone, if you know it. docs/lab-notes/capacity.md shows how such forecasts turned out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from selfless.metrics import student_quantile

Floats = npt.NDArray[np.float64]
FAR = 10  # times the tasks so far: a line is not followed further than that
LEAST = 3  # tasks; fewer have no trend


@dataclass(frozen=True)
class Forecast:
    """How many more tasks fit: `more`, between `low` and `high` with probability `level`; math.inf where there is no loss.

    tasks     the number of tasks so far, n
    slope     the change of a new task's accuracy with each task, b; (slope_low, slope_high) its interval
    margin    how much a new task may lose
    """

    tasks: int
    slope: float
    slope_low: float
    slope_high: float
    margin: float
    level: float

    @property
    def more(self) -> float:
        """k for the slope b."""
        return self._fit(self.slope)

    @property
    def low(self) -> float:
        """k for the lower end of the slope's interval: the fewest tasks."""
        return self._fit(self.slope_low)

    @property
    def high(self) -> float:
        """k for the upper end of the slope's interval: the most tasks."""
        return self._fit(self.slope_high)

    def _fit(self, slope: float) -> float:
        if slope >= 0:
            return math.inf
        return max(0, math.floor(1 + self.margin / -slope + 1e-9) - self.tasks)

    def as_dict(self) -> dict[str, float | None]:
        """Return plain values for JSON; None stands for "no limit"."""
        names = ("tasks", "slope", "slope_low", "slope_high", "margin", "level", "more", "low", "high")
        values = {name: float(getattr(self, name)) for name in names}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}

    def __str__(self) -> str:
        points = f"{100 * abs(self.slope):.2f}"
        change = f"{points} points {'worse' if self.slope < 0 else 'better'} than" if float(points) else "as good as"
        says, level, far = f"Each new task is {change} the one before", f"{100 * self.level:.0f} % interval", FAR * self.tasks
        if self.slope_low > self.margin:
            return f"{says}, so the first tasks were hardly trained or harder: this says nothing of the room ({level})."
        if self.low > far:
            return f"{says}: no sign that room ends within {far} more tasks ({level}; by the accuracy of new tasks alone)."
        left = f"more than {far}" if self.more > far else f"{self.more:.0f} more"
        room = f"room for {left} {'task' if self.more == 1 else 'tasks'}"
        interval = f"{level}: {self.low:.0f} or more" if self.high > far else f"{level}: {self.low:.0f} to {self.high:.0f}"
        return f"{says}; {room} before one is more than {100 * self.margin:g} points below the first ({interval})."


def forecast(accuracy: Sequence[float] | Sequence[Sequence[float]] | Floats, margin: float = 0.02, level: float = 0.8) -> Forecast:
    """Return the forecast after n tasks.

    accuracy   of each task just after learning it, (n,), or by seed (S, n); in fractions
    margin     how much a new task may lose against the first, as a fraction
    level      the probability of the intervals
    """
    try:
        y = np.atleast_2d(np.asarray(accuracy, dtype=np.float64))
    except ValueError:
        raise ValueError("seeds have different numbers of tasks; pass the accuracies of the tasks that all of them have") from None
    seeds, tasks = y.shape
    if tasks < LEAST:
        raise ValueError(f"a forecast needs {LEAST} tasks or more, but there are {tasks}; train more tasks first")
    if not np.isfinite(y).all():
        raise ValueError("an accuracy is missing or not finite; pass the accuracy on each task just after learning it")
    if y.max() > 1 + 1e-6 or y.min() < 0:
        raise ValueError(f"an accuracy is {y.max() if y.max() > 1 else y.min():g}; pass fractions from 0 to 1, so 0.9 for 90 %")
    if not 0 < level < 1 or not 0 < margin <= 1:
        raise ValueError(f"margin is {margin} and level is {level}; both are fractions between 0 and 1, so 0.05 for 5 points")
    t = np.arange(tasks) - (tasks - 1) / 2
    spread = seeds * float(t @ t)
    slope = float((y * t).sum() / spread)
    residual = y - y.mean() - slope * t
    freedom = seeds * tasks - 2
    width = student_quantile((1 + level) / 2, freedom) * math.sqrt(float((residual**2).sum()) / freedom / spread)
    return Forecast(tasks, slope, slope - width, slope + width, margin, level)


def fitted(accuracy: Sequence[float] | Floats, margin: float, after: int) -> int | None:
    """Return how many tasks after the first `after` did fit: what happened, to judge a forecast. None if all of them fitted.

    Single tasks are noisy, so the accuracies (T,) are first fitted by the nearest sequence that never rises.
    """
    trend = never_rising(np.asarray(accuracy, dtype=np.float64))
    lost = np.flatnonzero(trend < trend[0] - margin - 1e-12)
    return max(0, int(lost[0]) - after) if len(lost) else None


def never_rising(y: Floats) -> Floats:
    """The non-increasing sequence z with the least Σ (z − y)²: neighbours that rise are replaced by their mean."""
    blocks: list[tuple[float, int]] = []
    for value in y.tolist():
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            (b, m), (a, n) = blocks.pop(), blocks.pop()
            blocks.append(((a * n + b * m) / (n + m), n + m))
    return np.concatenate([np.full(n, value) for value, n in blocks])
