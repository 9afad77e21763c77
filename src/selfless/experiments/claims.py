"""Does a claim hold? Mean ± std over seeds, paired differences with bootstrap 95 % intervals, and a verdict.

    holds      the whole interval of mean(a − b) lies on the claimed side of the margin
    fails      none of it does
    undecided  the margin lies within it (or there is one seed, so no interval)
    missing    a cell that the claim speaks of has no values

A claim of several comparisons holds when all do, fails when one fails, and is otherwise undecided (missing, if one is missing); so does a
comparison in every task, which is told by its worst task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from selfless.experiments.base import Claim, Comparison, Place
from selfless.metrics import paired_interval

Verdict = Literal["holds", "fails", "undecided", "missing"]
WORST_FIRST: tuple[Verdict, ...] = ("fails", "missing", "undecided", "holds")
Values = Mapping[int, float]  # seed → value


@dataclass(frozen=True)
class Judged:
    """One comparison: the paired difference, its interval, over how many seeds, and the verdict; `task`, from 1, if it is one task's."""

    part: Comparison
    mean: float
    low: float
    high: float
    seeds: int
    verdict: Verdict
    task: int | None = None


def judge(part: Comparison, values: Mapping[Place, Values], by_task: Sequence[Mapping[Place, Values]] = ()) -> Judged:
    """Of the averages; or on each task, of which the worst is told."""
    if not part.every_task:
        return _judge(part, values)
    found = [replace(_judge(part, those), task=number) for number, those in enumerate(by_task, 1)]
    return min((one for one in found if one.seeds), key=_badness, default=_judge(part, {}))


def _badness(one: Judged) -> tuple[int, float]:
    return WORST_FIRST.index(one.verdict), -one.high if one.part.relation == "≤" else one.low


def _judge(part: Comparison, values: Mapping[Place, Values]) -> Judged:
    """d = a − b on the seeds that both have, or a itself; a fixed generator, so the same values give the same interval."""
    a = values.get(part.a, {})
    b = dict.fromkeys(a, 0.0) if part.b is None else values.get(part.b, {})
    both = sorted(a.keys() & b.keys())
    if not both:
        return Judged(part, math.nan, math.nan, math.nan, 0, "missing")
    x, y = [a[s] for s in both], [b[s] for s in both]
    mean = float(np.mean(np.subtract(x, y)))
    low, high = paired_interval(x, y)
    return Judged(part, mean, low, high, len(both), verdict(low, high, part))


def verdict(low: float, high: float, part: Comparison) -> Verdict:
    if math.isnan(low) or math.isnan(high):
        return "undecided"
    if part.relation == "≥":
        return "holds" if low >= part.margin else "fails" if high < part.margin else "undecided"
    if part.relation == ">":
        return "holds" if low > part.margin else "fails" if high <= part.margin else "undecided"
    return "holds" if high <= part.margin else "fails" if low > part.margin else "undecided"


def together(verdicts: Sequence[Verdict]) -> Verdict:
    return min(verdicts, key=WORST_FIRST.index, default="missing")


def judged(claim: Claim, values: Mapping[Place, Values], by_task: Sequence[Mapping[Place, Values]] = ()) -> tuple[Verdict, list[Judged]]:
    parts = [judge(part, values, by_task) for part in claim.parts]
    return together([p.verdict for p in parts]), parts
