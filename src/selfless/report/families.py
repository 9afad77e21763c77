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
        adjusted = holm(p)
        for i, (r, c) in enumerate(places):
            claim = records[r]["claims"][c]
            changed[r, c] = {
                "alone": claim["verdict"],
                "verdict": claim["verdict"] if adjusted[i] <= ALPHA else "undecided",
                "adjusted": float(adjusted[i]),
                "level": 1 - _largest_p(p[:i] + p[i + 1 :]) / looks[i],
                "looks": looks[i],
            }
    return [
        record | {"claims": [claim | changed.get((r, c), {}) for c, claim in enumerate(record["claims"])]}
        for r, record in enumerate(records)
    ]


def _largest_p(others: Sequence[float]) -> float:
    """Return the largest p-value with which Holm's correction decides a claim, beside the other ones of its family."""
    count = len(others) + 1
    kept = 0  # how many of the others are decided before it
    for p in sorted(others):
        if p > ALPHA / (count - kept):
            break
        kept += 1
    return ALPHA / (count - kept)


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


def what_would_change(claim: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    """Return what would change the verdict of a claim; `part` is its decisive comparison.

    A decided claim would be undecided at another margin: the near end of the interval at the level of the family. An undecided one would be
    decided by more seeds at this mean and spread, or by another mean with these seeds. To hold, all comparisons must decide, and to fail
    one of K, which must be surer. Seeds that are added are one more look.
    """
    mean, std, n, margin = part["mean"], part.get("std"), part["seeds"], part["margin"]
    if mean is None or std is None or n < 2:
        return "" if mean is None else "a second seed"
    among, verdict = len(claim["parts"]) * part.get("of", 1), claim["verdict"]
    towards_fails = verdict == "fails" or (verdict == "undecided" and not _leans_to_holds(part))
    error = (1 - claim.get("level", 1 - ALPHA)) / (among if towards_fails else 1)
    beyond = 1 if towards_fails == (part["relation"] == "≤") else -1  # the side of the margin on which the mean lies, or must lie
    side, half = "above" if beyond > 0 else "below", _half_width(part, error)
    if verdict != "undecided":
        return f"a margin {side} {text(mean - beyond * half, 2, part['b'] is not None)}"
    others = [] if towards_fails else [one for one in claim["parts"] if one is not part]
    looks, most = claim.get("looks", 1), claim.get("most_seeds")
    needed = [
        seeds_to_decide(one["mean"] - one["margin"], one["std"], level=1 - error * looks / (looks + 1))
        if towards_fails or _leans_to_holds(one)
        else None
        for one in (part, *others)
    ]
    seeds = "more than 1,000 seeds" if None in needed else f"{max(n for n in needed if n):,} seeds"
    if most is not None and None not in needed:
        seeds += f", more than the {most} that are reported here,"
    if not all(_leans_to_holds(one) and abs(one["mean"] - one["margin"]) > _half_width(one, error) for one in others):
        return f"{seeds} at this mean and spread; another mean of this comparison alone would not"
    return f"{seeds} at this mean and spread, or a mean {side} {text(margin + beyond * half, 2, part['b'] is not None)}"


def _leans_to_holds(part: Mapping[str, Any]) -> bool:
    """Return True if the mean of a comparison is on the claimed side of its margin."""
    return bool(part["mean"] != part["margin"]) and bool((part["mean"] > part["margin"]) == (part["relation"] != "≤"))


def _half_width(part: Mapping[str, Any], error: float) -> float:
    """t s/√n, half of the interval that misses the mean with this probability."""
    half: float = student_quantile(1 - error / 2, part["seeds"] - 1) * part["std"] / part["seeds"] ** 0.5
    return half
