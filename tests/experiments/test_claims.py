"""Verdicts on distributions that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from selfless.experiments.base import Claim, Comparison, at_least, at_most, more
from selfless.experiments.claims import decide, judge, judge_claim

A, B = ("SLNID", "x"), ("No-Reg", "x")


def drawn(rng: np.random.Generator, gap: float, seeds: int, noise: float = 1.0) -> dict[tuple[str, str], dict[int, float]]:
    """Two cells that share a large effect of the seed and differ by `gap` ± noise."""
    shared = rng.normal(90, 5, seeds)
    return {A: dict(enumerate(shared + gap + rng.normal(0, noise, seeds))), B: dict(enumerate(shared))}


def test_a_large_gap_holds_and_its_opposite_fails() -> None:
    values = drawn(np.random.default_rng(0), 3.0, 5, 0.3)
    assert judge(at_least(A, B, 2), values).verdict == "holds"
    assert judge(at_least(A, B, 4), values).verdict == "fails"
    assert judge(at_most(A, B, 4), values).verdict == "holds"
    assert judge(at_most(A, B, 2), values).verdict == "fails"
    assert judge(at_least(A, B, 3), values).verdict == "undecided"


def test_a_value_by_itself() -> None:
    """Without a second cell, the value itself is held against the margin."""
    nothing = {A: dict.fromkeys(range(3), 0.0)}
    assert judge(at_most(A, None), nothing).verdict == "holds"
    assert str(at_most(A, None)) == "SLNID ≤ 0 (x)"
    assert judge(at_most(A, None), {A: {0: 0.1, 1: 0.2, 2: 0.15}}).verdict == "fails"
    assert judge(at_least(A, None, 94), {A: {0: 94.5, 1: 94.4, 2: 94.6}}).verdict == "holds"
    assert judge(at_least(A, None), {}).verdict == "missing"


def test_pairing_takes_the_effect_of_the_seed_out() -> None:
    values = drawn(np.random.default_rng(1), 1.0, 8, 0.2)
    found = judge(at_least(A, B), values)
    assert found.verdict == "holds"
    assert found.high - found.low < 0.5  # the seeds themselves spread over some 15 points
    unpaired = {A: values[A], B: {s: values[B][(s + 1) % 8] for s in values[B]}}
    assert judge(at_least(A, B), unpaired).verdict == "undecided"


@pytest.mark.parametrize(("gap", "right"), [(1.0, "holds"), (-1.0, "fails")])
def test_verdicts_are_mostly_right_and_seldom_wrong(gap: float, right: str) -> None:
    """True difference ± 1, noise 1, ten seeds: the verdict agrees with the truth most times, and contradicts it almost never."""
    rng = np.random.default_rng(2)
    found = [judge(at_least(A, B), drawn(rng, gap, 10)).verdict for _ in range(200)]
    wrong = {"holds": "fails", "fails": "holds"}[right]
    assert found.count(right) > 130  # type: ignore[arg-type]
    assert found.count(wrong) <= 2  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_interval_covers_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    inside = 0
    for _ in range(300):
        found = judge(at_least(A, B), drawn(rng, 0.7, 5))
        inside += found.low <= 0.7 <= found.high
    assert 0.90 <= inside / 300 <= 0.98


def test_only_seeds_that_both_have_are_paired_and_nothing_is_missing() -> None:
    values = {A: {0: 95.0, 1: 96.0, 2: 97.0}, B: {1: 90.0, 2: 91.0, 7: 10.0}}
    found = judge(at_least(A, B, 5), values)
    assert (found.seeds, found.mean, found.verdict) == (2, 6.0, "holds")
    one = judge(at_least(A, B), {A: {0: 95.0}, B: {0: 90.0}})
    assert one.verdict == "undecided"
    assert math.isnan(one.low)
    assert judge(at_least(A, B), {A: {0: 95.0}, B: {1: 90.0}}).verdict == "missing"
    assert judge(at_least(A, B), {A: {0: 95.0}}).verdict == "missing"


def test_the_verdict_is_where_the_interval_lies() -> None:
    """Margins just inside and just outside of both ends of the interval, in all three relations."""
    values = drawn(np.random.default_rng(0), 3.0, 5, 0.3)
    found = judge(at_least(A, B), values)
    for margin, above, below in ((found.low - 1e-6, "holds", "fails"), (found.low + 1e-6, "undecided", "undecided")):
        assert judge(at_least(A, B, margin), values).verdict == above
        assert judge(more(A, B, margin), values).verdict == above
        assert judge(at_most(A, B, margin), values).verdict == below
    for margin, above, below in ((found.high + 1e-6, "fails", "holds"), (found.high - 1e-6, "undecided", "undecided")):
        assert judge(at_least(A, B, margin), values).verdict == above
        assert judge(at_most(A, B, margin), values).verdict == below
    low, high = found.bootstrap
    assert found.low < low < found.mean < high < found.high  # with five seeds the bootstrap is narrower


def flat(gap: float, spread: float, seeds: int = 5) -> dict[tuple[str, str], dict[int, float]]:
    """Two cells whose differences are `gap` ± `spread` in turn."""
    return {A: {s: gap + spread * (-1) ** s for s in range(seeds)}, B: dict.fromkeys(range(seeds), 0.0)}


def test_a_claim_holds_if_all_its_parts_do_and_fails_if_one_surely_does() -> None:
    values = drawn(np.random.default_rng(0), 3.0, 5, 0.3)
    none = at_least(("later", "x"), B)
    assert judge_claim(Claim("both", (at_least(A, B, 2), at_least(A, B, 1))), values).verdict == "holds"
    assert judge_claim(Claim("both", (at_least(A, B, 2), at_least(A, B, 3))), values).verdict == "undecided"
    assert judge_claim(Claim("both", (at_least(A, B, 2), at_least(A, B, 6))), values).verdict == "fails"
    assert judge_claim(Claim("both", (none, at_least(A, B, 3))), values).verdict == "missing"
    assert judge_claim(Claim("both", (none, at_least(A, B, 6))), values).verdict == "fails"
    assert judge_claim(Claim("none", ()), values).verdict == "missing"


def test_one_of_many_comparisons_fails_by_chance_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty comparisons without a difference: by the worst interval more than half of such claims would fail; corrected, few do."""
    monkeypatch.setattr("selfless.experiments.claims.paired_interval", lambda *_: (0.0, 0.0))  # slow, and decides nothing
    rng = np.random.default_rng(4)
    places = [(f"row {i}", "x") for i in range(20)]
    claim = Claim("none is behind", tuple(at_least(place, B) for place in places))
    verdicts, worst = [], []
    for _ in range(60):
        values = {place: dict(enumerate(rng.normal(0, 1, 5))) for place in places} | {B: dict.fromkeys(range(5), 0.0)}
        found = judge_claim(claim, values)
        verdicts.append(found.verdict)
        worst.append(any(part.verdict == "fails" for part in found.parts))
    assert sum(worst) > 15
    assert verdicts.count("fails") <= 6


def test_the_p_value_of_a_claim() -> None:
    values = flat(1.0, 0.5)
    one = judge_claim(Claim("one", (at_least(A, B),)), values)
    assert one.p == pytest.approx(2 * one.parts[0].p_holds)
    three = judge_claim(Claim("three", (at_least(A, B, 1.8), at_least(A, B, 1.9), at_least(A, B, 2.0))), values)
    assert three.p == pytest.approx(2 * 3 * min(part.p_fails for part in three.parts))
    assert (decide(0.025, 0.975), decide(0.9, 0.02), decide(0.03, 0.97), decide(math.nan, math.nan)) == (
        "holds",
        "fails",
        "undecided",
        "undecided",
    )


def test_the_same_values_give_the_same_interval() -> None:
    values = drawn(np.random.default_rng(5), 0.3, 5)
    assert judge(at_least(A, B), values) == judge(at_least(A, B), values)


def test_a_tie_is_not_ahead() -> None:
    """Equal runs have no spread: there is nothing to test, and the value decides."""
    same = {A: dict.fromkeys(range(3), 90.0), B: dict.fromkeys(range(3), 90.0)}
    assert judge(at_least(A, B), same).verdict == "holds"
    assert judge(at_most(A, B), same).verdict == "holds"
    assert judge(more(A, B), same).verdict == "fails"
    assert judge(more(A, B, -1), same).verdict == "holds"


def test_in_every_task_is_told_by_the_worst_one() -> None:
    """Ahead by 2 in the first task and by 1 in the second, behind by 1 in the third: it fails there; without the third it holds."""
    gaps = (2.0, 1.0, -1.0)
    by_task = [{A: {s: 90 + s + gap + 0.1 * s for s in range(5)}, B: {s: 90.0 + s for s in range(5)}} for gap in gaps]
    part = more(A, B, every_task=True)
    found = judge(part, {}, by_task)
    assert (found.verdict, found.task, round(found.mean, 2)) == ("fails", 3, -0.8)
    found = judge(part, {}, by_task[:2])
    assert (found.verdict, found.task, round(found.mean, 2)) == ("holds", 2, 1.2)
    assert judge(part, {A: {0: 1.0}, B: {0: 0.0}}).verdict == "missing"  # averages do not tell
    assert judge(part, {}, [*by_task, {A: {0: 1.0}}]).task == 3  # a fourth task of one of them alone is not compared
    below = Comparison(A, B, "≤", 1.5, every_task=True)
    assert (judge(below, {}, by_task).verdict, judge(below, {}, by_task).task) == ("fails", 1)
    assert str(part) == "SLNID > No-Reg (x), in every task"
    assert judge_claim(Claim("both", (more(A, B), part)), {A: {0: 2.0, 1: 2.1}, B: {0: 1.0, 1: 1.0}}, by_task)[0] == "fails"
