"""Everything that was measured as one table, the figures to reach marked ✓ or ✗."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from selfless.bench.plan import PARTS
from selfless.bench.rows import Row, duration, size

TITLES = {
    "steps": "training steps, MAS + SLNID, the gather inside",
    "importance": "exact importance",
    "penalty": "SLNID by width",
    "fleet": "how cost grows",
    "sequence": "whole sequences",
    "peers": "other libraries",
}


def table(found: dict[str, Any]) -> Table:
    about = found["hardware"]
    title = f"{about['hardware']}, {about['threads']} threads, torch {about['torch']}, selfless {about['selfless']} {about['commit']}"
    made = Table(title=title + ("; --quick: a look, not a result" if found["quick"] else ""), title_justify="left")
    for column in ("", "time", "a second", "which is", "memory", "to reach"):
        made.add_column(column, justify="right" if column in ("time", "memory") else "left")
    for part in PARTS:
        if part in found:
            made.add_row(f"[bold]{TITLES[part]}[/bold]")
            for line in found[part]:
                made.add_row(*_cells(line))
            made.add_section()
    return made


def _cells(line: Row) -> tuple[str, ...]:
    target = line["target"]
    return (
        line["what"],
        duration(line["seconds"]) if line["seconds"] is not None else "–",
        line["rate"],
        line["says"],
        size(line["memory_bytes"]) if line["memory_bytes"] is not None else "",
        f"{target['text']} [{'green' if target['met'] else 'red'}]{'✓' if target['met'] else '✗'}[/]" if target else "",
    )
