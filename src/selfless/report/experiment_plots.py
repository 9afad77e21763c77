"""The figures of recorded experiments: `figures` draws them, `save` writes them as files. One module of `report.figures` per kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from selfless.report.drawing import save_pdf, save_png
from selfless.report.figures.bars import bars
from selfless.report.figures.curves import curves
from selfless.report.figures.dots import dots
from selfless.report.figures.gain import gain
from selfless.report.figures.histogram import histogram
from selfless.report.figures.importance import importance
from selfless.report.figures.pairs import pairs
from selfless.report.figures.rule import rule
from selfless.report.records import Record

DRAW: dict[str, Callable[[Record], dict[str, Figure]]] = {  # an experiment's `figure` → caption → figure
    "bars": bars,
    "dots": dots,
    "pairs": pairs,
    "curves": curves,
    "histogram": histogram,
    "importance": importance,
    "rule": rule,
    "gain": gain,
}


def figures(record: Record) -> dict[str, Figure]:
    """Return caption → figure; empty if nothing has run."""
    if not any(cell["mean"] is not None for cell in record["cells"]):
        return {}
    return DRAW[record["figure"]](record)


def save(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write every figure as `<experiment>-<profile>[-2 …].png` and `.pdf` into the folder; return the paths."""
    written = []
    for record in records:
        name = f"{record['name']}-{record['profile']}{'-quick' * record['quick']}"
        for number, figure in enumerate(figures(record).values(), 1):
            path = folder / (f"{name}-{number}" if number > 1 else name)
            written += [save_png(figure, path.with_name(f"{path.name}.png"), dpi=150), save_pdf(figure, path.with_name(f"{path.name}.pdf"))]
    return written
