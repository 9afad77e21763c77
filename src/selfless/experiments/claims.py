"""Judging claims: paired differences over seeds, their 95 % intervals by Student's t, and a verdict.

    holds      the whole interval of mean(a − b) lies on the claimed side of the margin
    fails      none of it does
    undecided  the margin lies within it (or there is one seed, so no interval)
    missing    a cell that the claim names has no values

A claim of K comparisons, or a comparison in T tasks, holds if all hold and fails if one fails. Of their one-sided p-values

    p_holds = max p_holds,    p_fails = min(1, K · min p_fails),    p = 2 min(p_holds, p_fails)

so that one wrong comparison of many does not make a claim fail by chance. It is decided if p ≤ 5 %. This p does not know of other claims:
`selfless.report.families` corrects it for their number. The bootstrap interval is recorded beside the one by t and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from selfless.experiments.base import Claim, Comparison, Place
from selfless.metrics import paired_interval, paired_p_values, paired_t_interval, spread

Verdict = Literal["holds", "fails", "undecided", "missing"]
WORST_FIRST: tuple[Verdict, ...] = ("fails", "missing", "undecided", "holds")
Values = Mapping[int, float]  # seed → value
ALPHA = 0.05


@dataclass(frozen=True)
class Judgement:
    """The paired difference of one comparison, its interval, the number of seeds, and the verdict.

    std        standard deviation of the differences
    bootstrap  the percentile bootstrap interval
    p_holds    one-sided p-value for "holds"; p_fails that for "fails"
    task       the worst task, from 1, of a comparison in every task; else None
    of         how many tasks were compared
    """

    part: Comparison
    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    seeds: int = 0
    verdict: Verdict = "missing"
    task: int | None = None
    std: float = math.nan
    bootstrap: tuple[float, float] = (math.nan, math.nan)
    p_holds: float = math.nan
    p_fails: float = math.nan
    of: int = 1


class JudgedClaim(NamedTuple):
    """The verdict of a claim, its two-sided p-value (NaN if it was not tested), and the judgement of each comparison."""

    verdict: Verdict
    p: float
    parts: list[Judgement]


def judge(part: Comparison, values: Mapping[Place, Values], by_task: Sequence[Mapping[Place, Values]] = ()) -> Judgement:
    """Judge one comparison by the averages, or task by task; then the worst task is reported, with the p-values of all tasks."""
    if not part.every_task:
        return _judge(part, values)
    found = [replace(_judge(part, those), task=number) for number, those in enumerate(by_task, 1)]
    found = [one for one in found if one.seeds]
    if not found:
        return Judgement(part)
    holds, fails = combine(found)
    worst = min(found, key=_badness)
    return replace(worst, p_holds=holds, p_fails=fails, verdict=decide(holds, fails), of=len(found))


def _badness(one: Judgement) -> tuple[int, float]:
    return WORST_FIRST.index(one.verdict), -one.high if one.part.relation == "≤" else one.low


def _judge(part: Comparison, values: Mapping[Place, Values]) -> Judgement:
    """Judge d = a − b on the seeds that both have, or a itself. The bootstrap is seeded: the same values give the same interval."""
    a = _gained(part.a, part.since, values)
    b = dict.fromkeys(a, 0.0) if part.b is None else _gained(part.b, part.since, values)
    both = sorted(a.keys() & b.keys())
    if not both:
        return Judgement(part)
    x, y = [a[s] for s in both], [b[s] for s in both]
    mean, std = spread([u - v for u, v in zip(x, y, strict=True)])
    low, high = paired_t_interval(x, y)
    above, below = paired_p_values(x, y, part.margin)
    holds, fails = (below, above) if part.relation == "≤" else (above, below)
    if above == below == 1.0:  # every difference is the margin itself: "at least" and "at most" hold, "more" fails
        holds, fails = (1.0, 0.0) if part.relation == ">" else (0.0, 1.0)
    return Judgement(part, mean, low, high, len(both), decide(holds, fails), None, std, paired_interval(x, y), holds, fails)


def _gained(place: Place, since: str, values: Mapping[Place, Values]) -> Values:
    """Return the values of a place, minus those of its row in the column `since` if there is one."""
    found, before = values.get(place, {}), values.get((place[0], since), {})
    return {seed: found[seed] - before[seed] for seed in found.keys() & before.keys()} if since else found


def decide(p_holds: float, p_fails: float, alpha: float = ALPHA) -> Verdict:
    """Return the verdict of two one-sided p-values; at 5 % it is where the 95 % interval lies with respect to the margin."""
    return "holds" if 2 * p_holds <= alpha else "fails" if 2 * p_fails <= alpha else "undecided"  # NaN: undecided


def combine(parts: Sequence[Judgement]) -> tuple[float, float]:
    """(p_holds, p_fails) of several comparisons together: all must hold, one may fail."""
    known = [p for p in parts if not math.isnan(p.p_holds)]
    holds = max((p.p_holds for p in known), default=math.nan) if len(known) == len(parts) else math.nan
    return holds, min(1.0, len(known) * min(p.p_fails for p in known)) if known else math.nan


def judge_claim(claim: Claim, values: Mapping[Place, Values], by_task: Sequence[Mapping[Place, Values]] = ()) -> JudgedClaim:
    """Return the verdict of a claim, its p-value, and the judgement of each comparison."""
    parts = [judge(part, values, by_task) for part in claim.parts]
    holds, fails = combine(parts)
    verdict = decide(holds, fails)
    if (verdict != "fails" and any(not part.seeds for part in parts)) or not parts:
        return JudgedClaim("missing", math.nan, parts)
    known = [p for p in (holds, fails) if not math.isnan(p)]
    return JudgedClaim(verdict, min(1.0, 2 * min(known)) if known else math.nan, parts)
