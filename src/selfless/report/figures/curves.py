"""Curves: how many weights stay free, by λ, as in figure 4, top."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from selfless.report.drawing import WIDTH, Look, legend, looks, looks_of, panel, style
from selfless.report.figures.details import details
from selfless.report.records import Record, by_place, rows_and_columns
from selfless.report.wording import text


def curves(record: Record) -> dict[str, Figure]:
    """Draw the free first-layer weights after each task, one line per λ; the legend has the average accuracy."""
    cells = by_place(record)
    rows, _ = rows_and_columns(record)
    drawn = [(cells[row, "free after task 1"], cells[row, "average accuracy"]) for row in rows]
    drawn = [(free, average) for free, average in drawn if details(free)]
    labels = [f"{free['row']}\u2003{text(average['mean'], 1)}" for free, average in drawn]
    with style():
        figure, axes = panel(WIDTH, labels, "Free first-layer weights after each task")
        for (free, _), look, label in zip(drawn, _swept([free["row"] for free, _ in drawn]), labels, strict=True):
            v = np.array(details(free))
            x = np.arange(1, v.shape[1] + 1)
            dashes = "--" if free["row"] == "No-Reg" else "-"
            axes.plot(x, v.mean(0), color=look.colour, marker=look.marker, linestyle=dashes, label=label, clip_on=False)
            if len(v) > 1:
                spread = v.std(0, ddof=1)
                axes.fill_between(x, v.mean(0) - spread, v.mean(0) + spread, color=look.colour, alpha=0.18, linewidth=0)
        axes.set_ylim(0, 100)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
        axes.set(xlabel="tasks learnt", ylabel="free first-layer weights (%)")
        legend(figure, axes, labels)
    return {"Weights of the first layer with Ω < 0.01 after each task, by λ; average accuracy at the end in the legend.": figure}


def _swept(rows: Sequence[str]) -> list[Look]:
    """Give No-Reg the look that it has in every figure, and each λ the next colour."""
    others = iter(looks(rows))
    return [looks_of([row])[0]._replace(marker="X") if row == "No-Reg" else next(others) for row in rows]
