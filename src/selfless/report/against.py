"""Two folders of records side by side: which values and verdicts agree, and which do not.

A mean has moved if |a − b| > 2 √(s_a²/n_a + s_b²/n_b). Two runs with the same seed see the same data in the same order and start from
the same weights. But rounding differs between machines and between fleets, and training amplifies it: a second run is another sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from selfless.report.families import correct
from selfless.report.records import Cell, Record, judged, load, read
from selfless.report.tables import line_of
from selfless.report.wording import text, value


def records(folder: Path) -> list[Record]:
    """Return the records of a folder of results, or of a folder with only records."""
    found = load(folder) or [read(path) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise ValueError(f"{folder} holds no record of an experiment; make one: selfless reproduce fig-2 --out {folder}")
    return found


def against(ours: Sequence[Record], theirs: Sequence[Record], names: tuple[str, str]) -> str:
    """Return Markdown: how many values and verdicts agree, the verdicts that differ, the values that moved or have another choice."""
    others = {_name(record): record for record in theirs}
    pairs = [(record, others[_name(record)]) for record in ours if _name(record) in others]
    pairs = list(zip(correct([_shared(a, b) for a, b in pairs]), correct([_shared(b, a) for a, b in pairs]), strict=True))
    if not pairs:
        raise ValueError(f"{names[0]} and {names[1]} have no experiment in common, of the same profile and both quick or both not")
    cells = [(a["name"], *both) for a, b in pairs for both in _cells(a, b)]
    claims = [(is_ours, (a["name"], *both)) for a, b in pairs for is_ours, both in _claims(a, b)]
    changed = [line for _, line in claims if line[2] != line[3]]
    opposite = sum({"holds", "fails"} == set(line[2:]) for _, line in claims)
    apart = [abs(b["mean"] - a["mean"]) for _, a, b in cells] or [0.0]
    summary = (
        f"{len(pairs)} experiments in both. {len(cells)} values, half of them within {text(median(apart))}, "
        f"{sum(_otherwise(a, b) for _, a, b in cells)} of another choice, "
        f"{sum(_moved(a, b) for _, a, b in cells)} moved by more than two standard errors; what experiments share counts in each. "
        f"{len(claims) - len(changed)} of {len(claims)} verdicts are the same{_of_the_paper(claims)}, {opposite} opposite."
    )
    parts = [f"# {names[0]} against {names[1]}\n\n{summary}\n"]
    if changed:
        parts.append(_table("Verdicts that differ", ["experiment", "claim", *names], changed))
    listed = [
        (name, f"{a['row']}, {a['column']}", value(a), value(b), text(b["mean"] - a["mean"], 2, True), _why(a, b))
        for name, a, b in cells
        if _why(a, b)
    ]
    if listed:
        parts.append(_table("Values chosen otherwise, or moved", ["experiment", "value", *names, "difference", ""], listed))
    return "\n".join(parts)


def _name(record: Record) -> tuple[str, str, bool]:
    return record["name"], record["profile"], record["quick"]


def _shared(a: Record, b: Record) -> Record:
    """Return record a with the claims that b makes too, so that both are corrected for the same number of claims."""
    texts = {claim["text"] for claim in b["claims"]}
    return a | {"claims": [claim for claim in a["claims"] if claim["text"] in texts]}


def _cells(a: Record, b: Record) -> Iterator[tuple[Cell, Cell]]:
    """Yield each cell that has a mean in both records."""
    other = {(c["row"], c["column"], c["value"]): c for c in b["cells"]}
    for cell in a["cells"]:
        same = other.get((cell["row"], cell["column"], cell["value"]))
        if same is not None and cell["mean"] is not None and same["mean"] is not None:
            yield cell, same


def _otherwise(a: Cell, b: Cell) -> bool:
    return bool(a["method"] != b["method"])


def _moved(a: Cell, b: Cell) -> bool:
    """Return whether the mean has moved; False for a single seed, which has no spread."""
    if a["std"] is None or b["std"] is None:
        return False
    error = math.sqrt(sum(c["std"] ** 2 / sum(run["value"] is not None for run in c["runs"]) for c in (a, b)))
    return bool(abs(a["mean"] - b["mean"]) > 2 * error)


def _why(a: Cell, b: Cell) -> str:
    return "; ".join([f"another choice: {b['method']}"] * _otherwise(a, b) + ["moved"] * _moved(a, b))


def _claims(a: Record, b: Record) -> list[tuple[bool, tuple[str, str, str]]]:
    """Return (is it ours, (claim, verdict, verdict)) for the claims of both records."""
    other = {claim["text"]: claim["verdict"] for claim in judged(b)}
    counted = [claim for claim in judged(a) if claim["text"] in other and not claim.get("repeats")]
    return [(claim.get("ours", False), (claim["text"], claim["verdict"], other[claim["text"]])) for claim in counted]


def _of_the_paper(claims: Sequence[tuple[bool, tuple[str, ...]]]) -> str:
    """Return how many of the verdicts on the paper's claims are the same; "" if all claims are the paper's."""
    same = [line[2] == line[3] for is_ours, line in claims if not is_ours]
    return "" if len(same) == len(claims) else f" (of the paper's claims {sum(same)} of {len(same)})"


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([f"## {title}\n", *map(line_of, (header, ["---"] * len(header), *rows))]) + "\n"
