"""Bars: accuracy on each task after the last one, as in figures 2 and 3 of the paper."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from selfless.report.drawing import INK, WIDTH, floor, legend, limit_accuracy, looks_of, panel, style
from selfless.report.figures.details import details, hatch
from selfless.report.records import Cell, Record, rows_and_columns
from selfless.report.wording import text


def bars(record: Record) -> dict[str, Figure]:
    """Draw one figure per column: accuracy on each task after the last one, one bar per method.

    A column with one method beside columns with several is in the record for a claim, and is not drawn.
    """
    _, columns = rows_and_columns(record)
    found = {n: [c for c in record["cells"] if c["column"] == n and c["value"] == "average" and details(c)] for n in columns}
    most, made = max(map(len, found.values()), default=0), {}
    for column, drawn in found.items():
        if drawn and (len(drawn) > 1 or most == 1):
            made[f"{column}: accuracy on each task after the last one; averages in the legend."] = _bars(drawn)
    return made


def _bars(drawn: Sequence[Cell]) -> Figure:
    values = [np.array(details(c)) for c in drawn]  # (seeds, tasks) each
    tasks = max(v.shape[1] for v in values)
    labels = [f"{c['row']}\u2003{text(c['mean'], 1)}" + (f" ± {c['std']:.1f}" if c["std"] is not None else "") for c in drawn]
    with style():
        width = min(max(WIDTH, 0.17 * (len(drawn) + 1) * tasks + 0.9), 11)
        figure, axes = panel(width, labels, "Accuracy on each task after the last one")
        wide = 0.84 / len(drawn)
        for i, (cell, v, look) in enumerate(zip(drawn, values, looks_of([c["row"] for c in drawn]), strict=True)):
            place = np.arange(1, v.shape[1] + 1) + (i - (len(drawn) - 1) / 2) * wide
            axes.bar(place, v.mean(0), wide * 0.9, color=look.colour, hatch=hatch(cell["row"], look), label=labels[i], linewidth=0)
            if len(v) > 1:
                axes.errorbar(place, v.mean(0), v.std(0, ddof=1), fmt="none", ecolor=INK, elinewidth=0.9, capsize=1.2)
        every = [float(x) for v in values for x in v.mean(0)]
        low = floor(every)
        spread = max((float(v.std(0, ddof=1).max()) for v in values if len(v) > 1), default=0.0)
        limit_accuracy(axes, low, max(every) + spread + 0.04 * (100 - low))
        axes.set_xlim(0.5, tasks + 0.5)
        axes.set_xticks(range(1, tasks + 1))
        axes.set(xlabel="task", ylabel="accuracy (%)" + (f", axis from {low:g}" if low else ""))
        legend(figure, axes, labels)
    return figure
