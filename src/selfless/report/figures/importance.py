"""Importance: which neurons matter to which task, as in the appendix on locality."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from selfless.report.drawing import COLOURS, WIDTH, style
from selfless.report.figures.details import details
from selfless.report.records import Record, by_place, rows_and_columns


def importance(record: Record) -> dict[str, Figure]:
    """Draw neuron importance after tasks 1, 2 and 3 of one network: in place, and sorted by the first task's."""
    cells = by_place(record)
    rows, columns = rows_and_columns(record)
    after = [column for column in columns if column.startswith("after task")]
    known = [row for row in rows if all(details(cells[row, column]) for column in after)]
    series = {row: np.array([details(cells[row, column])[0] for column in after]) for row in known}  # (tasks, neurons), summed over tasks
    if not series:
        return {}
    return {
        "First-layer neuron importance α after tasks 1, 2 and 3, stacked; neurons in place. First seed.": _stacked(series, False),
        "The same, sorted by the first task's importance.": _stacked(series, True),
    }


def _stacked(series: dict[str, Any], ordered: bool) -> Figure:
    with style():
        figure = Figure(figsize=(WIDTH, 1.75 * len(series) + 0.6), layout="constrained")
        figure.set_label("Neuron importance" + (", sorted" if ordered else ", in place"))
        strips = figure.subplots(len(series), sharey=True, squeeze=False)[:, 0]
        for axes, (row, alpha) in zip(strips, series.items(), strict=True):
            own = np.diff(alpha, axis=0, prepend=0.0)  # what each task added
            own = own[:, np.argsort(-alpha[0])] if ordered else own
            base = np.zeros(own.shape[1])
            for t, height in enumerate(own):
                axes.bar(
                    np.arange(len(base)), height, 0.9, bottom=base, color=COLOURS[(0, 1, 2)[t % 3]], label=f"task {t + 1}", linewidth=0
                )
                base = base + height
            axes.set_title(row, loc="left")
            axes.spines["left"].set_visible(False)
            axes.grid(axis="y")
            axes.margins(x=0.01)
        strips[-1].set_xlabel("neuron, most important for task 1 first" if ordered else "neuron")
        figure.supylabel("importance α", fontsize=10)
        figure.legend(*strips[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=1.2)
    return figure
