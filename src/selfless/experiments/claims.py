"""Judging claims: paired differences over seeds, their 95 % bootstrap intervals, and a verdict.

    holds      the whole interval of mean(a − b) lies on the claimed side of the margin
    fails      none of it does
    undecided  the margin lies within it (or there is one seed, so no interval)
    missing    a cell that the claim names has no values

A claim of several comparisons holds if all hold, fails if one fails, is missing if one is missing, and is undecided otherwise. A comparison
in every task is judged in the same way, and its worst task is reported.
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
class Judgement:
    """The paired difference of one comparison, its interval, the number of seeds, and the verdict.

    task   the worst task, from 1, of a comparison in every task; else None
    """

    part: Comparison
    mean: float
    low: float
    high: float
    seeds: int
    verdict: Verdict
    task: int | None = None


def judge(part: Comparison, values: Mapping[Place, Values], by_task: Sequence[Mapping[Place, Values]] = ()) -> Judgement:
    """Judge one comparison by the averages, or task by task; then the worst task counts."""
    if not part.every_task:
        return _judge(part, values)
    found = [replace(_judge(part, those), task=number) for number, those in enumerate(by_task, 1)]
    return min((one for one in found if one.seeds), key=_badness, default=_judge(part, {}))


def _badness(one: Judgement) -> tuple[int, float]:
    return WORST_FIRST.index(one.verdict), -one.high if one.part.relation == "≤" else one.low


def _judge(part: Comparison, values: Mapping[Place, Values]) -> Judgement:
    """Judge d = a − b on the seeds that both have, or a itself. The bootstrap is seeded: the same values give the same interval."""
    a = values.get(part.a, {})
    b = dict.fromkeys(a, 0.0) if part.b is None else values.get(part.b, {})
    both = sorted(a.keys() & b.keys())
    if not both:
        return Judgement(part, math.nan, math.nan, math.nan, 0, "missing")
    x, y = [a[s] for s in both], [b[s] for s in both]
    mean = float(np.mean(np.subtract(x, y)))
    low, high = paired_interval(x, y)
    return Judgement(part, mean, low, high, len(both), verdict(low, high, part))


def verdict(low: float, high: float, part: Comparison) -> Verdict:
    """Return where the interval lies with respect to the margin."""
    if math.isnan(low) or math.isnan(high):
        return "undecided"
    if part.relation == "≥":
        return "holds" if low >= part.margin else "fails" if high < part.margin else "undecided"
    if part.relation == ">":
        return "holds" if low > part.margin else "fails" if high <= part.margin else "undecided"
    return "holds" if high <= part.margin else "fails" if low > part.margin else "undecided"


def combine(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of a claim from those of its comparisons: the worst."""
    return min(verdicts, key=WORST_FIRST.index, default="missing")


def judge_claim(
    claim: Claim, values: Mapping[Place, Values], by_task: Sequence[Mapping[Place, Values]] = ()
) -> tuple[Verdict, list[Judgement]]:
    """Return the verdict of a claim and the judgement of each comparison."""
    parts = [judge(part, values, by_task) for part in claim.parts]
    return combine([p.verdict for p in parts]), parts
