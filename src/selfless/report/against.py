"""Two folders of records side by side: what was found again, and what was not.

A mean has moved where |a − b| > 2 √(s_a²/n_a + s_b²/n_b). Runs of one seed see the same data from the same weights in the same order, yet
rounding differs from machine to machine and from fleet to fleet, and training carries it on: a second run is another draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from selfless.report.experiments import Record, judged, load, read, text, value

Place = tuple[str, str, str]


def records(folder: Path) -> list[Record]:
    """Those of a folder of results, or of a folder that has records alone."""
    found = load(folder) or [read(path) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise ValueError(f"{folder} holds no record of an experiment; make one: selfless reproduce fig-2 --out {folder}")
    return found


def against(ours: Sequence[Record], theirs: Sequence[Record], names: tuple[str, str]) -> str:
    """Markdown: how many cells and verdicts agree; the verdicts that do not; the cells that were chosen otherwise or have moved."""
    others = {_name(record): record for record in theirs}
    pairs = [(record, others[_name(record)]) for record in ours if _name(record) in others]
    if not pairs:
        raise ValueError(f"{names[0]} and {names[1]} have no experiment in common")
    cells = list(dict.fromkeys(both for pair in pairs for both in _cells(*pair)))
    claims = [(a["name"], *both) for a, b in pairs for both in _claims(a, b)]
    apart = [abs(b - a) for _, _, a, b, _, _ in cells] or [0.0]
    other = [c for c in cells if "another choice" in c[5]]
    moved = [c for c in cells if "moved" in c[5]]
    changed = [c for c in claims if c[2] != c[3]]
    said = (
        f"{len(pairs)} experiments in both. {len(cells)} values, half of them within {text(median(apart))}, "
        f"{len(other)} of another choice, {len(moved)} moved by more than two standard errors. "
        f"{len(claims) - len(changed)} of {len(claims)} verdicts are the same."
    )
    parts = [f"# {names[0]} against {names[1]}\n\n{said}\n"]
    if changed:
        parts.append(_table("Verdicts that differ", ["experiment", "claim", *names], changed))
    listed = [(name, where, shown[0], shown[1], text(b - a, 2, True), why) for name, where, a, b, shown, why in cells if why]
    if listed:
        parts.append(_table("Values chosen otherwise, or moved", ["experiment", "value", *names, "difference", ""], listed))
    return "\n".join(parts)


def _name(record: Record) -> tuple[str, str, bool]:
    return record["name"], record["profile"], record["quick"]


def _cells(a: Record, b: Record) -> list[tuple[str, str, float, float, tuple[str, str], str]]:
    """(experiment, where, the two means, the two as written, what is different about them)."""
    other: dict[Place, Mapping[str, Any]] = {(c["row"], c["column"], c["value"]): c for c in b["cells"]}
    found = []
    for cell in a["cells"]:
        same = other.get((cell["row"], cell["column"], cell["value"]))
        if same is None or cell["mean"] is None or same["mean"] is None:
            continue
        error = math.sqrt(sum((c["std"] or 0.0) ** 2 / len(c["runs"]) for c in (cell, same)))
        why = ["another choice: " + same["method"]] if cell["method"] != same["method"] else []
        why += ["moved"] if abs(cell["mean"] - same["mean"]) > 2 * error else []
        where = f"{cell['row']}, {cell['column']}"
        found.append((a["name"], where, cell["mean"], same["mean"], (value(cell), value(same)), "; ".join(why)))
    return found


def _claims(a: Record, b: Record) -> list[tuple[str, str, str]]:
    """(claim, verdict, verdict) of those in both."""
    other = {claim["text"]: claim["verdict"] for claim in judged(b)}
    return [(claim["text"], claim["verdict"], other[claim["text"]]) for claim in judged(a) if claim["text"] in other]


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return f"## {title}\n\n" + "\n".join("| " + " | ".join(str(c).replace("|", "\\|") for c in row) + " |" for row in lines) + "\n"
