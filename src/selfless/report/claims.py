"""All claims of the recorded experiments in one Markdown table, and the values of each experiment in a small one.

    selfless report results/reproduction --format claims    # the table of claims
    selfless report results/reproduction --format values    # one small table per experiment

Both are short: of a claim with several comparisons, only the worst, which decides its verdict, is shown.
`selfless report DIR --format md` has every comparison and how strengths were chosen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from selfless.report.families import what_would_change, why_undecided
from selfless.report.quotes import PLACE_AT, words_of
from selfless.report.records import VERDICTS, Record, by_place, is_ours, judged, rows_and_columns
from selfless.report.tables import line_of
from selfless.report.wording import beside, text, value

PLACES = ("figure", "table", "section", "appendix")  # the order of the table; experiments that are not in the paper come last
PROFILES = ("equal", "ours", "paper")
WORST_FIRST = ("fails", "missing", "undecided", "holds")
EXPLANATION = """\
Differences are in points, with their 95 % interval over seeds by the paired t test. Of several comparisons the worst is
shown. `ours` chooses strengths on held-out data; `equal` does so from equal grids for all rows, by five seeds; `paper`
has the authors' settings and chooses on test data.

Verdicts are corrected for the number of claims of an experiment (Holm, 5 % for all of them together), so that an
interval which excludes the margin is not always enough. If seeds were added after a first verdict, p-values are
multiplied by the number of looks. A claim that two experiments make is counted once.

- ✓ holds: the corrected test shows the claimed side of the margin
- ✗ fails: it shows the other side
- ? undecided: it shows neither; "alone: …" is the verdict without the correction
- – not tested: a value that the claim needs is missing

The last column says what would change the verdict: the margin at which it would be undecided, or how many seeds would
decide if mean and spread stayed as they are."""


class ClaimRow(NamedTuple):
    """One claim of an experiment in all recorded profiles.

    words      the paper's own, if a sentence of the paper makes the claim
    name       the experiment
    where      the place in the paper, and the experiment
    published  the paper's difference, or "–"
    shown      profile → sign, difference and interval
    claims     profile → the claim as it was judged
    """

    text: str
    words: str
    name: str
    where: str
    published: str
    shown: dict[str, str]
    claims: Mapping[str, Mapping[str, Any]]
    ours: bool

    @property
    def leading_profile(self) -> str:
        """The first of PROFILES in which the claim was judged."""
        return next(profile for profile in PROFILES if profile in self.claims)

    @property
    def leading(self) -> Mapping[str, Any]:
        """The claim in the leading profile."""
        return self.claims[self.leading_profile]

    @property
    def source(self) -> str:
        """The place in the paper."""
        return self.where.partition(" (`")[0]

    @property
    def verdict(self) -> str:
        """The verdict in the leading profile."""
        return "not tested" if self.leading["verdict"] == "missing" else str(self.leading["verdict"])

    @property
    def reason(self) -> str:
        """Why the claim is undecided in the leading profile: correction, margin or noise; "" if it is decided or not tested."""
        return why_undecided(self.leading, decisive(self.leading)) if self.verdict == "undecided" else ""

    @property
    def change(self) -> str:
        """What would change the verdict in the leading profile."""
        return change_of(self.leading)


def profiles_of(records: Sequence[Record]) -> list[str]:
    """Return the profiles that have a column: those with a record, in the order of PROFILES; `ours` if there is none."""
    recorded = {record["profile"] for record in records if not record["quick"]}
    return [profile for profile in PROFILES if profile in recorded] or ["ours"]


def claim_rows(records: Sequence[Record]) -> list[ClaimRow]:
    """Return every claim once, in the order of the paper. Quick versions judge no claims and are left out."""
    rows: list[ClaimRow] = []
    profiles_shown = profiles_of(records)
    for name, profiles in by_experiment(records).items():
        found = {profile: {claim["text"]: claim for claim in judged(record)} for profile, record in profiles.items()}
        record = next(iter(profiles.values()))
        for text_, claim in {claim["text"]: claim for claims in found.values() for claim in claims.values()}.items():
            both = {profile: claims[text_] for profile, claims in found.items() if text_ in claims}
            counted = f"; counted in {claim['repeats']}" if claim.get("repeats") else ""
            published, *evidence = _evidence(both, profiles_shown)
            shown = dict(zip(profiles_shown, evidence, strict=True))
            where = f"{PLACE_AT.get((name, text_), record['source'])} (`{name}`{counted})"
            rows.append(ClaimRow(text_, words_of(name, text_), name, where, published, shown, both, is_ours(record, claim)))
    return rows


def claims_table(records: Sequence[Record]) -> str:
    """Return two Markdown tables: the claims of the paper, then our own."""
    rows: dict[bool, list[list[str]]] = {False: [], True: []}
    for row in claim_rows(records):
        rows[row.ours].append([row.text, row.where, row.published, *row.shown.values(), _verdict(row.claims), _change(row.claims)])
    head = ["claim", "where", "published", *(f"`{profile}`" for profile in profiles_of(records)), "verdict", "what would change it"]
    titles = {False: "Claims of the paper", True: "Our own claims"}
    parts = [f"## {titles[ours]}\n\n{table(head, found)}" for ours, found in rows.items() if found]
    return "\n\n".join([EXPLANATION, *parts]) + "\n"


def values_tables(records: Sequence[Record]) -> str:
    """Return one small Markdown table per experiment and profile: mean ± std over seeds beside the published value."""
    parts = []
    for name, profiles in by_experiment(records).items():
        for profile, record in profiles.items():
            rows, columns = rows_and_columns(record)
            cells = by_place(record)
            lines = [[row, *(value_beside(cells.get((row, column))) for column in columns)] for row in rows]
            shown = table(["", *(column or "accuracy" for column in columns)], lines)
            parts.append(f"## {name}, `{profile}`\n\n{record['title']} ({record['source']}).\n\n{shown}")
    return "\n\n".join(parts) + "\n"


def by_experiment(records: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """Return experiment → profile → record, in the order of the paper, without quick versions."""
    whole = sorted((record for record in records if not record["quick"]), key=_order)
    found: dict[str, dict[str, Record]] = {}
    for record in whole:
        found.setdefault(record["name"], {})[record["profile"]] = record
    return found


def _order(record: Record) -> tuple[int, list[str | int], int]:
    """Sort by kind of place, then by name with numbers as numbers, then by profile."""
    first = re.split(r"[ ,]", record["source"])[0]
    parts = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", record["name"])]
    return PLACES.index(first) if first in PLACES else len(PLACES), parts, PROFILES.index(record["profile"])


def _evidence(claims: Mapping[str, Mapping[str, Any]], profiles: Sequence[str]) -> list[str]:
    """Return the columns of one claim: published, and one for each profile."""
    worst = {profile: decisive(claim) for profile, claim in claims.items()}
    known = [part["published"] for part in worst.values() if part["published"] is not None]
    return [text(known[0], 2, signed=True) if known else "–", *(_compared(claims.get(profile)) for profile in profiles)]


def _compared(claim: Mapping[str, Any] | None) -> str:
    """Return "✓ +3.12 [+2.80, +3.44]", with the comparison where there are several."""
    if claim is None:
        return ""
    part = decisive(claim)
    if part["mean"] is None:
        return VERDICTS["missing"]
    signed = part["b"] is not None  # a difference, not a value
    shown = f"{VERDICTS[claim['verdict']]} {text(part['mean'], 2, signed)}"
    if part["low"] is not None:
        shown += f" [{text(part['low'], 2, signed)}, {text(part['high'], 2, signed)}]"
    if claim.get("alone", claim["verdict"]) != claim["verdict"]:
        shown += f", alone: {claim['alone']}"
    task = f", task {part['task']}" if part.get("task") else ""
    if len(claim["parts"]) > 1:
        return f"{shown} ({part['text']}{task}; worst of {len(claim['parts'])})"
    return f"{shown}{task}"


def decisive(claim: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the comparison that decides the verdict: the worst, and among equals the one nearest to the wrong side of its margin."""

    def rank(part: Mapping[str, Any]) -> tuple[int, float]:
        if part["low"] is None:
            return WORST_FIRST.index(part["verdict"]), math.inf
        spare = part["margin"] - part["high"] if part["relation"] == "≤" else part["low"] - part["margin"]
        return WORST_FIRST.index(part["verdict"]), spare

    found: Mapping[str, Any] = min(claim["parts"], key=rank)
    return found


def _verdict(claims: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one word if the profiles agree, else one per profile."""
    verdicts = {profile: "not tested" if claim["verdict"] == "missing" else claim["verdict"] for profile, claim in claims.items()}
    if len(set(verdicts.values())) == 1:
        return next(iter(verdicts.values()))
    return ", ".join(f"`{profile}`: {verdict}" for profile, verdict in verdicts.items())


def _change(claims: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what would change the verdict in each profile."""
    found = {profile: change_of(claim) for profile, claim in claims.items()}
    return "; ".join(f"`{profile}`: {change}" if len(claims) > 1 else change for profile, change in found.items() if change)


def change_of(claim: Mapping[str, Any]) -> str:
    """Return what would change the verdict of a claim in one profile; "" if it was not tested."""
    return "" if claim["verdict"] == "missing" else what_would_change(claim, decisive(claim))


def value_beside(cell: Mapping[str, Any] | None) -> str:
    """Return "95.83 ± 0.21 (published 95.83)"; an empty string for no cell."""
    if cell is None:
        return ""
    published = beside(cell)
    return f"{value(cell)} ({published.partition(' (')[0]})" if published else value(cell)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(map(line_of, (head, ["---"] * len(head), *rows)))
