"""Experiments on the HTML page: the sentences at its top, and one section per experiment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfless.report.claims import PROFILES
from selfless.report.markup import counted, inches, inline, link
from selfless.report.records import NOT_THE_PAPERS, Record, by_place, keys, rows_and_columns, run_file, tally, unjudged
from selfless.report.wording import beside, choices, interval, remarks, settings, text, value

UNKNOWN = {"undecided": "undecided", "missing": "not tested yet"}


def verdicts_sentence(experiments: Sequence[Record]) -> str:
    """Return how many claims hold in the first profile that has claims, in one sentence."""
    whole = [record for record in experiments if not record["quick"]]
    if not whole:
        return "Quick versions only: they show that everything runs, and prove nothing."
    if known := _counts_by_profile(whole):
        name, said = next(iter(known.items()))
        return f"Of the paper's claims {said}{f' (profile {name})' if len(known) > 1 else ''}."
    own = _verdict_counts(tally(whole, ours=True))
    return f"Of our own claims {own}." if own else "Nothing is claimed."


def _counts_by_profile(records: Sequence[Record]) -> dict[str, str]:
    """Return profile → the verdicts on the paper's claims, for the profiles that have any; the leading profile first."""
    counts = {name: _verdict_counts(tally([r for r in records if r["profile"] == name], ours=False)) for name in PROFILES}
    return {name: said for name, said in counts.items() if said}


def _verdict_counts(found: dict[str, int]) -> str:
    """Return "26 of 54 hold, 13 fail, 13 undecided"; an empty string if there are no claims."""
    tails = [f"{found['fails']} fail{'s' * (found['fails'] == 1)}"] + [f"{found[v]} {t}" for v, t in UNKNOWN.items() if found[v]]
    return f"{found['holds']} of {sum(found.values())} hold, {', '.join(tails)}" if any(found.values()) else ""


def support_sentence(experiments: Sequence[Record]) -> str:
    """Return how much was run, and what a verdict means."""
    summary = f"{counted(len(experiments), 'experiment')}, {counted(len(keys(experiments)), 'reported run')}."
    if all(record["quick"] for record in experiments):
        return summary
    for name, said in list(_counts_by_profile([record for record in experiments if not record["quick"]]).items())[1:]:
        summary += f" In profile {name} {said}."
    own = _verdict_counts(tally(experiments, ours=True))
    if own and any(tally(experiments, ours=False).values()):
        summary += f" Of our own claims {own}."
    return (
        f"{summary} A claim holds if the paired t test over seeds, corrected for the number of claims (Holm), "
        "shows that the difference lies on the claimed side of its margin; intervals are those of a single comparison, 95 %."
    )


def section(record: Record, here: Path) -> dict[str, Any]:
    """Return the template's values for one experiment. Links are relative to `here`, the folder of the page."""
    from selfless.report import experiment_plots

    rows, columns = rows_and_columns(record)
    common_settings, apart = settings(record)
    every = [set(cell.get("marks", ())) for cell in record["cells"]]
    common = set.intersection(*every) if every else set()  # shown once, above the table
    cells = {place: cell | {"marks": [m for m in cell.get("marks", ()) if m not in common]} for place, cell in by_place(record).items()}

    files = {key: run_file(record, key) for key in keys([record])}
    packed = [file for file in files.values() if file is not None and file.name != "metrics.json"]

    return {
        "record": record,
        "archive": packed[0] if packed else None,
        "id": f"{record['name']}-{record['profile']}{'-quick' * record['quick']}",
        "rows": rows,
        "columns": columns,
        "cells": {place: cell | {"text": value(cell), "beside": beside(cell)} for place, cell in cells.items()},
        "tally": tally([record], ours=record["source"] == NOT_THE_PAPERS),
        "published": any(cell["published"] is not None for cell in record["cells"]),
        "common": sorted(common),
        "marks": dict.fromkeys(mark for cell in cells.values() for mark in cell["marks"]),
        "claims": [c | {"parts": [p | {"shown": interval(p)} for p in c["parts"]]} for c in record["claims"]],
        "unjudged": unjudged(record),
        "figures": [(inline(f), caption, inches(f)) for caption, f in experiment_plots.figures(record).items()],
        "remarks": remarks(record),
        "settings": ", ".join(common_settings),
        "chosen": list(zip(choices(record), record["choices"], strict=True)),
        "runs": [
            (
                cell["row"],
                cell["column"],
                ", ".join(dict.fromkeys([*cell["method"].split(", "), *apart.get((cell["row"], cell["column"]), ())])),
                [run | {"href": link(files[run["key"]], here), "shown": text(run["value"])} for run in cell["runs"]],
            )
            for cell in record["cells"]
            if cell["runs"]
        ],
    }
