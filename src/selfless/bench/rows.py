"""One line of the table, and what the issue asks of it."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def row(
    what: str,
    seconds: float | None = None,
    *,
    rate: str = "",
    says: str = "",
    memory: int | None = None,
    target: Any = None,
    **figures: Any,
) -> Row:
    """what was measured; seconds of it; how many a second; what that means, in words; the most bytes held; raw figures, rounds included."""
    made: Row = {"what": what, "seconds": seconds, "rate": rate, "says": says, "memory_bytes": memory, "target": target}
    return made | figures


def aim(value: float, sense: str, limit: float, unit: str) -> dict[str, Any]:
    """A figure to reach: sense "≤" or "≥"."""
    return {"value": value, "text": f"{sense} {limit:g}{unit}", "met": value <= limit if sense == "≤" else value >= limit}


def duration(seconds: float) -> str:
    """In the unit that suits it: 431 µs, 3.06 ms, 7.92 s."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def size(count: int) -> str:
    """1,074 MiB, 0.5 MiB."""
    return f"{count / 2**20:,.1f} MiB" if count < 100 * 2**20 else f"{count / 2**20:,.0f} MiB"


def many(value: float) -> str:
    """A count a second, a ratio: three figures, thousands apart."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
