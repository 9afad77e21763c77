"""Verdicts of a family of claims: Holm's correction, and what would change a verdict.

A family is the claims of one experiment in one profile: the paper's, or ours. Of many true nulls one in twenty is decided by chance, so a
claim is decided only if its p-value, corrected for the number of claims in its family, is at most 5 %. A claim that repeats another
experiment's is no member: it is counted there. `as_one_family` is stricter: all claims of a profile are one family.

Whoever adds seeds until a claim is decided has tested it several times. A record lists its numbers of seeds so far (`looks`), and p-values
are multiplied by their count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from selfless.metrics import holm, seeds_to_decide, student_quantile
from selfless.report.records import Record, is_ours, judged
from selfless.report.wording import text

ALPHA = 0.05
NEAR = 0.5  # points: an interval that lies this close to its margin needs no more seeds to be understood


def correct(records: Sequence[Record], *, as_one_family: bool = False) -> list[Record]:
    """Return the records with corrected verdicts.

    Each claim of a family gets `alone`, its own verdict; `adjusted`, its corrected p-value; and `level`, the level of the interval that
    would decide it at its place in Holm's order. A claim without a p-value (not tested, or of an older record) keeps its verdict.
    """
    families: dict[tuple[str, str, bool], list[tuple[int, int]]] = {}
    for r, record in enumerate(records):
        for c, claim in enumerate(judged(record)):
            if claim.get("p") is not None and not claim.get("repeats"):
                name = "" if as_one_family else record["name"]
                families.setdefault((name, record["profile"], is_ours(record, claim)), []).append((r, c))
    changed: dict[tuple[int, int], dict[str, Any]] = {}
    for places in families.values():
        looks = [len(records[r].get("looks") or [0]) for r, _ in places]
        p = [min(1.0, max(0.0, n * records[r]["claims"][c]["p"])) for n, (r, c) in zip(looks, places, strict=True)]
        adjusted, order = holm(p), sorted(range(len(p)), key=lambda i: p[i])
        for rank, i in enumerate(order):
            claim = records[places[i][0]]["claims"][places[i][1]]
            decided = adjusted[i] <= ALPHA
            changed[places[i]] = {
                "alone": claim["verdict"],
                "verdict": claim["verdict"] if decided else "undecided",
                "adjusted": float(adjusted[i]),
                "level": 1 - ALPHA / (len(p) - rank) / looks[i],
            }
    return [
        record | {"claims": [claim | changed.get((r, c), {}) for c, claim in enumerate(record["claims"])]}
        for r, record in enumerate(records)
    ]


def why_undecided(claim: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    """Return why a claim is undecided, by its decisive comparison.

    correction   its own test decides, the corrected one does not
    margin       the whole interval lies within half a point of the margin: the effect is known, and it is about the margin
    noise        the interval is wider
    """
    if claim.get("alone", "undecided") != "undecided":
        return "correction"
    known = part["low"] is not None and max(abs(part["low"] - part["margin"]), abs(part["high"] - part["margin"])) <= NEAR
    return "margin" if known else "noise"


def what_would_change(part: Mapping[str, Any], verdict: str, level: float = 1 - ALPHA, among: int = 1) -> str:
    """Return what would change a verdict, by its decisive comparison.

    level   of the interval that decides in the family
    among   how many comparisons the claim has; it fails if one of them does, so that one must be surer

    A decided claim would be undecided at another margin: the near end of the interval. An undecided one would be decided by more seeds at
    this mean and spread, or by another mean with these seeds.
    """
    mean, std, n, margin = part["mean"], part.get("std"), part["seeds"], part["margin"]
    if mean is None or std is None or n < 2:
        return "" if mean is None else "a second seed"
    upper, signed = part["relation"] == "≤", part["b"] is not None
    towards_fails = verdict == "fails" or (verdict == "undecided" and (mean > margin) == upper)
    level = 1 - (1 - level) / (among if towards_fails else 1)
    half = student_quantile((1 + level) / 2, n - 1) * std / n**0.5
    beyond = 1 if towards_fails == upper else -1  # the side of the margin on which the mean lies, or must lie
    side = "above" if beyond > 0 else "below"
    if verdict != "undecided":
        return f"a margin {side} {text(mean - beyond * half, 2, signed)}"
    needed = seeds_to_decide(mean - margin, std, level=level)
    seeds = f"{needed:,} seeds" if needed is not None else "more than 1,000 seeds"
    return f"{seeds} at this mean and spread, or a mean {side} {text(margin + beyond * half, 2, signed)}"
