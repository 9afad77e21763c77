"""Dots: our values with their spread beside the published ones, as for tables 1 to 3."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from selfless.report.drawing import COLOURS, INK, WIDTH, end_at_100, style
from selfless.report.records import Cell, Record, rows_and_columns, value_label


def dots(record: Record) -> dict[str, Figure]:
    """Draw one figure per column: ours with its spread over seeds, beside the published value."""
    _, columns = rows_and_columns(record)
    made = {}
    for column in columns:
        drawn = [c for c in record["cells"] if c["column"] == column and (c["mean"] is not None or c["published"] is not None)]
        if any(c["mean"] is not None for c in drawn):
            beside = ", and the published values" if any(c["published"] is not None for c in drawn) else ""
            made[f"{column or record['title']}: ours ± std over seeds{beside}."] = _dots(drawn)
    return made


def _dots(drawn: Sequence[Cell]) -> Figure:
    with style():
        figure = Figure(figsize=(WIDTH, 0.34 * len(drawn) + 1.1), layout="constrained")
        figure.set_label("Ours beside the published values")
        axes = figure.add_subplot()
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)
        y = np.arange(len(drawn))[::-1]
        for at_y, cell in zip(y, drawn, strict=True):
            if cell["published"] is not None and cell["mean"] is not None:
                axes.plot([cell["published"], cell["mean"]], [at_y, at_y], color=INK, alpha=0.3, linewidth=1, zorder=1)
        known = [(at_y, c) for at_y, c in zip(y, drawn, strict=True) if c["mean"] is not None]
        stds = [c["std"] or 0.0 for _, c in known]
        axes.errorbar(
            [c["mean"] for _, c in known],
            [p for p, _ in known],
            xerr=stds,
            fmt="o",
            clip_on=False,
            color=COLOURS[0],
            capsize=2.5,
            label="ours",
        )
        published = [(at_y, c["published"]) for at_y, c in zip(y, drawn, strict=True) if c["published"] is not None]
        if published:
            axes.plot(
                [v for _, v in published],
                [p for p, _ in published],
                "D",
                color=COLOURS[4],
                markerfacecolor="none",
                label="published",
                zorder=3,
                clip_on=False,
            )
        axes.set_yticks(y, [c["row"] for c in drawn])
        axes.set_ylim(-0.6, len(drawn) - 0.4)
        axes.margins(x=0.08)
        end_at_100(axes, "x")
        axes.set_xlabel(value_label(drawn[0]))
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], names[::-1], loc="outside lower center", ncols=2, handlelength=1.6)
    return figure
