"""Schedules that lower the learning rate of a task when held-out data no longer improves, and end the task early.

plateau   by the accuracy: ×0.1 after 5 epochs without improvement, stop after 10 (the paper's rule)
halving   by the loss: ×0.5 after 6 epochs since the last improvement or the last halving, stop below a thousandth of the first rate
          (the rule of Serrà et al., 2018, and of Saha et al., 2021)
"""

from __future__ import annotations

from collections.abc import Sequence

PATIENCE, STOP, DROP = 5, 10, 0.1  # plateau
WAIT, HALF, LEAST = 6, 0.5, 1e-3  # halving


def lower(schedule: str, stalled: Sequence[int], improved: Sequence[bool], shares: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return (stalled, factor of the rate) of every member after an epoch.

    stalled    epochs without improvement so far; STOP or more: the member has stopped
    shares     the current rate of each member as a share of its first
    """
    found = [_halve(*member) if schedule == "halving" else _drop(*member[:2]) for member in zip(stalled, improved, shares, strict=True)]
    return [s for s, _ in found], [factor for _, factor in found]


def _drop(stalled: int, is_better: bool) -> tuple[int, float]:
    now = 0 if is_better else stalled + 1
    return now, 0.0 if now >= STOP else DROP if now == PATIENCE else 1.0


def _halve(stalled: int, is_better: bool, share: float) -> tuple[int, float]:
    now = 0 if is_better else stalled + 1
    if stalled >= STOP:
        return stalled, 0.0
    if now < WAIT:
        return now, 1.0
    return (STOP, 0.0) if share * HALF < LEAST else (0, HALF)
