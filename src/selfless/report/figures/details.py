"""Functions that several figures share: the series recorded with a cell, and the hatch of a method."""

from __future__ import annotations

from typing import Any

from selfless.report.drawing import FUNCTIONS, PARAMETERS, Look
from selfless.report.records import Cell


def details(cell: Cell) -> list[Any]:
    """Return the series that were recorded with a cell's value, one per finished run."""
    return [run["detail"] for run in cell["runs"] if run["detail"] is not None]


def hatch(row: str, look: Look) -> str | None:
    """Return the hatch that distinguishes two methods of the same colour, or None."""
    return "////" if row in PARAMETERS or look.again else "----" if row in FUNCTIONS else None
