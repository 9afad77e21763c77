"""Rows of a benchmark, numbers in words, and the table of all rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from selfless.bench.plan import PARTS

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]
TITLES = {
    "steps": "training steps, MAS + SLNID, the gather inside",
    "importance": "exact importance",
    "penalty": "SLNID by width",
    "fleet": "how cost grows",
    "growth": "how cost grows, to the largest sizes",
    "sequence": "whole sequences",
    "peers": "other libraries",
}


def make_row(
    what: str,
    seconds: float | None = None,
    *,
    rate: str = "",
    says: str = "",
    memory: int | None = None,
    target: dict[str, Any] | None = None,
    **figures: Any,
) -> Row:
    """Return one row of bench.json.

    what: what was measured. seconds: its time. rate: how many a second. says: the result in words. memory: the most bytes held at a time.
    target: see `make_target`. figures: further numbers, the rounds among them.
    """
    row: Row = {"what": what, "seconds": seconds, "rate": rate, "says": says, "memory_bytes": memory, "target": target}
    return row | figures


def make_target(value: float, sense: str, limit: float, unit: str) -> dict[str, Any]:
    """Return a target and whether `value` meets it; `sense` is "≤" or "≥"."""
    return {"value": value, "text": f"{sense} {limit:g}{unit}", "met": value <= limit if sense == "≤" else value >= limit}


def format_duration(seconds: float) -> str:
    """Return the time in a suitable unit: 431 µs, 3.06 ms, 7.92 s."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def format_size(count: int) -> str:
    """Return a number of bytes in MiB: 1,074 MiB, 0.5 MiB."""
    return f"{count / 2**20:,.1f} MiB" if count < 100 * 2**20 else f"{count / 2**20:,.0f} MiB"


def format_number(value: float) -> str:
    """Return a rate or a ratio with three digits, or as a whole number with separators: 0.929, 1,234."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(found: dict[str, Any]) -> Table:
    """Return all rows as one table for the terminal; a target is marked ✓ or ✗."""
    from rich.table import Table

    about = found["hardware"]
    title = f"{about['hardware']}, {about['threads']} threads, torch {about['torch']}, selfless {about['selfless']} {about['commit']}"
    shown = Table(title=title + ("; --quick: a look, not a result" if found["quick"] else ""), title_justify="left")
    for column in ("", "time", "a second", "which is", "of the limit", "memory", "to reach"):
        shown.add_column(column, justify="right" if column in ("time", "of the limit", "memory") else "left")
    for part in PARTS:
        if part in found:
            shown.add_row(f"[bold]{TITLES[part]}[/bold]")
            for row in found[part]:
                shown.add_row(*_cells(row))
            shown.add_section()
    return shown


def _cells(row: Row) -> tuple[str, ...]:
    target = row["target"]
    return (
        row["what"],
        format_duration(row["seconds"]) if row["seconds"] is not None else "–",
        row["rate"],
        row["says"],
        f"{100 * row['of_limit']:.0f} %" if row.get("of_limit") else "",
        format_size(row["memory_bytes"]) if row["memory_bytes"] is not None else "",
        f"{target['text']} [{'green' if target['met'] else 'red'}]{'✓' if target['met'] else '✗'}[/]" if target else "",
    )
