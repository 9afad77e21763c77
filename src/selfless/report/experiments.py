"""Recorded experiments as tables: for the terminal, Markdown, LaTeX and CSV. Cells are shown beside published values, claims with verdicts.

Other code imports only this module for recorded experiments: it re-exports the functions of `records` and `wording`.
"""

from __future__ import annotations

import csv as csv_format
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from selfless.report.records import VERDICTS, Cell, Record, by_place, judged, keys, load, marked, read, rows_and_columns, tally, unjudged
from selfless.report.tables import defuse, line_of, tex
from selfless.report.wording import beside, choices, heading, interval, provenance, remarks, settings, text, value

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "Record",
    "csv",
    "interval",
    "keys",
    "latex",
    "load",
    "markdown",
    "marked",
    "read",
    "remarks",
    "settings",
    "tally",
    "terminal",
]

ACROSS = 4  # columns of a table in a terminal


def terminal(record: Record) -> RenderableType:
    """Return what `rich.print` shows: the cells, the claims, and how strengths were chosen."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if any("marks" not in cell for cell in record["cells"]):
        record = record | {"cells": [cell | {"marks": []} for cell in record["cells"]]}
    rows, columns = rows_and_columns(record)
    cells = by_place(record)
    tables: list[RenderableType] = []
    for some in [columns[k : k + ACROSS] for k in range(0, len(columns), ACROSS)]:  # a wider table would break words
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("")
        for column in some:
            table.add_column(Text(column or record["title"]), justify="right")
        for row in rows:
            found = [cells.get((row, column)) for column in some]
            if any(cell is not None for cell in found):
                table.add_row(Text(row), *(Text("" if cell is None else _lines(cell)) for cell in found))
        tables += [Text(), table] if tables else [table]
    claims = Table(box=None, pad_edge=False, show_header=False)
    for number, line in enumerate(unjudged(record)):
        claims.add_row(Text(f"  {line}" if number else line))
    for claim in judged(record):
        style = {"holds": "green", "fails": "red", "undecided": "yellow"}.get(claim["verdict"], "dim")
        claims.add_row(Text(f"{VERDICTS[claim['verdict']]} {claim['verdict']}", style=style), Text(claim["text"]))
        for part in claim["parts"]:
            claims.add_row("", Text(f"{part['text']}: {interval(part)}", style="dim"))
    below = [Text(f"– {line}", style="dim") for line in (*choices(record), *remarks(record))]
    title = Text(f"\n{heading(record)}: {record['title']}", style="bold")
    return Group(title, *tables, Text(), claims, *below, Text(provenance(record), style="dim"), Text())


def _lines(cell: Cell) -> str:
    """Return a cell of `terminal`: its value, the published one, its marks or its error."""
    return "\n".join(filter(None, [value(cell), beside(cell), " ".join(cell["marks"] or ([cell["error"]] if cell["error"] else []))]))


def _matrix(record: Record) -> list[list[str]]:
    """Return the heading and the rows as text. Published values and differences get their own columns where there are any."""
    rows, columns = rows_and_columns(record)
    cells = by_place(record)
    known = {column for (_, column), cell in cells.items() if cell["published"] is not None}
    lines = [["", *(t for c in columns for t in ([c or "accuracy", "published", "difference"] if c in known else [c or "accuracy"]))]]
    for row in rows:
        line = [row]
        for column in columns:
            cell = cells.get((row, column))
            marks = f" ({', '.join(cell['marks'])})" if cell is not None and cell.get("marks") else ""
            line.append("" if cell is None else value(cell) + marks)
            if column in known:
                line += ["", ""] if cell is None else [text(cell["published"]), text(cell["difference"], 2, True)]
        lines.append(line)
    return lines


def markdown(records: Sequence[Record]) -> str:
    """Return a GitHub table per experiment, then its claims, then its settings and footnotes."""
    parts = []
    for record in records:
        head, *rows = _matrix(record)
        table = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
        parts += [f"## {heading(record)}", record["title"] + ".", "\n".join(map(line_of, table))]
        if lines := unjudged(record):
            parts += [lines[0].capitalize(), "\n".join(f"* {line}" for line in lines[1:])]  # another bullet starts another list
        if found := judged(record):
            claims = [["verdict", "claim", "difference, 95 % interval"], ["---"] * 3]
            claims += [[c["verdict"], c["text"], "<br>".join(f"{p['text']}: {interval(p)}" for p in c["parts"])] for c in found]
            parts.append("\n".join(map(line_of, claims)))
        common, _ = settings(record)
        trained = [f"Trained with: {', '.join(common)}"] if common else []
        parts.append("\n".join(f"- {line}" for line in (*trained, *choices(record), *remarks(record), provenance(record))))
    return "\n\n".join(filter(None, parts)) + "\n"


def latex(records: Sequence[Record]) -> str:
    """Return a booktabs tabular per experiment, its claims as comments above it."""
    parts = [r"% \usepackage{booktabs}"]
    for record in records:
        head, *rows = [[tex(t) for t in line] for line in _matrix(record)]
        lines = [f"% {heading(record)}: {record['title']}"]
        lines += [f"% {line}" for line in (*unjudged(record), *(f"{claim['verdict']}: {claim['text']}" for claim in judged(record)))]
        lines += [rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\toprule", " & ".join(head) + r" \\", r"\midrule"]
        lines += [" & ".join(row) + r" \\" for row in rows]
        parts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}", *(rf"\par {tex(line)}." for line in remarks(record))]))
    return "\n\n".join(parts) + "\n"


def csv(records: Sequence[Record]) -> str:
    """Return one row per cell and one per comparison, at full precision, in percent (or counts)."""
    file = io.StringIO()
    rows = csv_format.writer(file, lineterminator="\n")
    rows.writerow("experiment profile quick kind row column mean std low high seeds published difference status method".split())
    for record in records:
        start = [defuse(record["name"]), record["profile"], record["quick"]]
        for cell in record["cells"]:
            seeds = sum(run["value"] is not None for run in cell["runs"])
            numbers = [_full(cell["mean"]), _full(cell["std"]), "", "", seeds, _full(cell["published"]), _full(cell["difference"])]
            status = "; ".join(cell.get("marks") or [cell["status"]])
            rows.writerow([*start, "cell", defuse(cell["row"]), defuse(cell["column"]), *numbers, status, defuse(cell["method"])])
        for claim in record["claims"]:
            for part in claim["parts"]:
                numbers = [_full(part["mean"]), "", _full(part["low"]), _full(part["high"]), part["seeds"], _full(part["published"]), ""]
                status = "not judged" if record["quick"] else part["verdict"]
                rows.writerow([*start, "claim", defuse(part["text"]), defuse(claim["text"]), *numbers, status, ""])
    return file.getvalue()


def _full(number: float | None) -> str:
    return "" if number is None else repr(float(number))
