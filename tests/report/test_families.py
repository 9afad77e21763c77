"""Families of claims: corrected verdicts, each claim counted once, and what would change a verdict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from selfless.experiments.base import at_least, at_most
from selfless.experiments.claims import judge
from selfless.metrics import student_quantile
from selfless.report.claims import claims_table
from selfless.report.families import correct, what_would_change, why_undecided
from selfless.report.records import tally

A, B = ("SLNID", "x"), ("No-Reg", "x")


def claim(text: str, p: float | None, verdict: str = "holds", **fields: Any) -> dict[str, Any]:
    part = {"text": "a ≥ b", "a": A, "b": B, "relation": "≥", "margin": 0.0, "published": None, "task": None, "verdict": verdict}
    numbers = {"mean": 2.0, "low": 1.0, "high": 3.0, "std": 0.8, "bootstrap": [1.2, 2.8], "seeds": 5}
    return {"text": text, "ours": False, "verdict": verdict, "p": p, "parts": [part | numbers], **fields}


def record(name: str, *claims: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": name, "profile": "ours", "quick": False, "source": "figure 1", "claims": list(claims), **fields}


def verdicts(*records: dict[str, Any], **options: bool) -> list[str]:
    return [c["verdict"] for r in correct(records, **options) for c in r["claims"]]


def test_a_family_is_the_claims_of_an_experiment() -> None:
    a = record("fig-2", claim("1", 0.01), claim("2", 0.04), claim("3", 0.02, "fails"))
    b = record("fig-3a", claim("4", 0.04))
    assert verdicts(a, b) == ["holds", "holds", "fails", "holds"]  # 3 · 0.01, 2 · 0.02 and 0.04 are below 5 %
    assert verdicts(record("fig-2", claim("1", 0.02), claim("2", 0.04))) == ["holds", "holds"]
    assert verdicts(record("fig-2", claim("1", 0.03), claim("2", 0.04))) == ["undecided", "undecided"]  # the first stops Holm's steps
    assert verdicts(a, b, as_one_family=True) == ["holds", "undecided", "undecided", "undecided"]
    own = record("fig-2", claim("1", 0.03), claim("2", 0.04, ours=True))
    assert verdicts(own) == ["holds", "holds"]  # the paper's and ours are two families
    paper = record("fig-2", claim("2", 0.04)) | {"profile": "paper"}
    assert verdicts(record("fig-2", claim("1", 0.03)), paper) == ["holds", "holds"]


def test_every_look_at_more_seeds_counts() -> None:
    claims = claim("1", 0.01), claim("2", 0.04)
    assert verdicts(record("fig-2", *claims, looks=[10])) == ["holds", "holds"]
    twice = record("fig-2", *claims, looks=[10, 60])
    assert verdicts(twice) == ["holds", "undecided"]  # 2 · 2 · 0.01 and 2 · 0.04
    found = correct([twice])[0]["claims"]
    assert [one["adjusted"] for one in found] == [0.04, 0.08]
    assert [one["level"] for one in found] == pytest.approx([1 - 0.05 / 4, 1 - 0.05 / 2])


def test_what_was_not_tested_or_is_quick_is_left_alone() -> None:
    made = record("fig-2", claim("1", None, "missing"), claim("2", 0.04))
    assert verdicts(made) == ["missing", "holds"]
    assert verdicts(record("fig-2", claim("1", 0.9, "holds")) | {"quick": True}) == ["holds"]
    assert correct([made])[0]["claims"][1]["alone"] == "holds"


def test_a_claim_of_two_experiments_counts_once() -> None:
    made = correct([record("fig-3a", claim("1", 0.04)), record("table-1", claim("1 again", 0.04, repeats="fig-3a"), claim("2", 0.04))])
    assert tally(made) == {"holds": 2, "fails": 0, "undecided": 0, "missing": 0}
    assert "counted in fig-3a" in claims_table(made)


@pytest.mark.parametrize("relation", ["≥", "≤"])
@pytest.mark.parametrize("mean", [-1.0, 0.3, 1.0])
def test_what_is_said_to_change_a_verdict_does(mean: float, relation: str) -> None:
    """Judge again with the margin, the mean or the number of seeds that the sentence names."""
    make = at_least if relation == "≥" else at_most
    rng = np.random.default_rng(0)
    noise = rng.normal(size=6)
    noise = 0.5 * (noise - noise.mean()) / noise.std(ddof=1)

    def judged(mean: float, margin: float = 0.0, copies: int = 1) -> Any:
        return judge(make(A, B, margin), {A: dict(enumerate(np.tile(mean + noise, copies))), B: dict.fromkeys(range(6 * copies), 0.0)})

    one = judged(mean)
    part = {"mean": one.mean, "std": one.std, "seeds": one.seeds, "margin": 0.0, "relation": relation, "b": B}
    said = what_would_change({"parts": [part], "verdict": one.verdict}, part)
    number, side = float(said.split()[-1].replace("−", "-")), {"above": 0.02, "below": -0.02}[said.split()[-2]]
    if one.verdict != "undecided":
        assert judged(mean, number + side).verdict == "undecided"
        assert judged(mean, number - side).verdict == one.verdict
        return
    assert judged(number + side).verdict != "undecided"
    assert judged(number - side).verdict == "undecided"
    seeds = int(said.split()[0])
    assert judged(mean, copies=-(-seeds // 6) + 1).verdict != "undecided"


@pytest.mark.parametrize(
    ("low", "high", "alone", "reason"),
    [
        (-0.3, 0.4, "undecided", "margin"),
        (-0.3, 0.6, "undecided", "noise"),
        (0.1, 0.4, "holds", "correction"),
        (None, None, "undecided", "noise"),
    ],
)
def test_an_undecided_claim_has_a_reason(low: float | None, high: float | None, alone: str, reason: str) -> None:
    made = claim("1", 0.2, "undecided", alone=alone)
    assert why_undecided(made, made["parts"][0] | {"margin": 2.0} | {k: v and 2 + v for k, v in (("low", low), ("high", high))}) == reason


PART = {"mean": -0.5, "std": 0.5, "seeds": 5, "margin": 0.0, "relation": "≥", "b": B}


def said_of(*parts: dict[str, Any], verdict: str = "undecided", **fields: Any) -> str:
    return what_would_change({"parts": list(parts), "verdict": verdict, **fields}, parts[0])


def test_one_seed_asks_for_a_second_and_many_comparisons_for_more() -> None:
    few, many = (int(said_of(*[PART] * k).split()[0]) for k in (1, 18))
    assert few < many
    assert said_of(PART | {"mean": 0.0}).startswith("more than 1,000 seeds")
    assert said_of(PART | {"std": None, "seeds": 1}) == "a second seed"
    assert said_of(PART | {"mean": None}, verdict="missing") == ""


def test_all_comparisons_must_hold() -> None:
    first, wide, sure = (PART | {"mean": mean, "std": std} for mean, std in ((0.3, 0.5), (0.5, 2.0), (0.9, 0.1)))
    alone = int(said_of(first).split()[0])
    assert int(said_of(first, sure).split()[0]) == alone
    assert "or a mean above" in said_of(first, sure)
    assert int(said_of(first, wide).split()[0]) == int(said_of(wide).split()[0]) > alone
    assert said_of(first, wide).endswith("; another mean of this comparison alone would not")
    assert said_of(first, sure | {"mean": -0.1}).startswith("more than 1,000 seeds")


def test_added_seeds_are_one_more_look() -> None:
    once, thrice = (int(said_of(PART, looks=looks).split()[0]) for looks in (1, 3))
    gap, half = 0.5, student_quantile(1 - 0.05 / 2 / 2, once - 1) * 0.5 / once**0.5  # half of 5 %, by a second look
    assert half < gap < student_quantile(1 - 0.05 / 2 / 2, once - 2) * 0.5 / (once - 1) ** 0.5
    assert thrice < once  # the level has been divided by three already
    assert "more than the 5 that are reported here" in said_of(PART, most_seeds=5)


def test_a_claim_knows_how_many_seeds_its_experiment_reports() -> None:
    from selfless.experiments import experiment
    from selfless.experiments.record import judge_claims

    limits = {name: {one.get("most_seeds") for one in judge_claims(experiment(name, "equal"), [])} for name in ("fig-3b", "fig-2", "ewc")}
    assert limits == {"fig-3b": {5}, "fig-2": {None}, "ewc": {None, 10}}


@pytest.mark.parametrize("i", range(5))
def test_the_level_is_that_at_which_holm_decides(i: int) -> None:
    """Move the p-value of one claim; its verdict must change where its level says."""
    p = [0.001, 0.012, 0.02, 0.3, 0.6]
    found = correct([record("fig-2", *(claim(str(k), one) for k, one in enumerate(p)))])[0]["claims"]
    for factor, verdict in ((0.99, "holds"), (1.01, "undecided")):
        moved = [factor * (1 - found[i]["level"]) if k == i else one for k, one in enumerate(p)]
        assert verdicts(record("fig-2", *(claim(str(k), one) for k, one in enumerate(moved))))[i] == verdict


def test_no_comparison_of_the_paper_is_counted_twice() -> None:
    """Across all experiments, a comparison of the same measure of the same candidates belongs to one counted claim."""
    from selfless.experiments import PAPER, experiment

    counted: dict[Any, str] = {}
    for name in PAPER:
        made = experiment(name, "ours", record={"cells": []})
        cells = {cell.place: (cell.candidates, cell.value, tuple(cell.then.items())) for cell in made.cells}
        for part in (part for one in made.claims if not one.repeats for part in one.parts):
            ends = tuple(cells[place] if cells.get(place, ((), ""))[0] else place for place in (part.a, part.b) if place is not None)
            what = (ends, part.relation, part.margin, part.every_task)
            assert counted.setdefault(what, name) == name, f"{name} and {counted[what]} both count {part}"
