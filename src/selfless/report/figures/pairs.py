"""Pairs: every method alone and with SLNID, joined by a line, as in the experiment `rivals`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from selfless.report.drawing import COLOURS, INK, WIDTH, end_at_100, style
from selfless.report.records import Cell, Record, by_place, rows_and_columns, value_label


def pairs(record: Record) -> dict[str, Figure]:
    """Draw one figure for each two columns "x" and "x + SLNID": one line per method, from one value to the other."""
    _, columns = rows_and_columns(record)
    cells, made = by_place(record), {}
    for column in (c for c in columns if f"{c} + SLNID" in columns):
        drawn = [
            (c, cells.get((c["row"], f"{column} + SLNID"))) for c in record["cells"] if c["column"] == column and c["value"] == "average"
        ]
        drawn = [(a, b) for a, b in drawn if a["mean"] is not None or (b is not None and b["mean"] is not None)]
        if drawn:
            made[f"{column}: average accuracy of every method alone and with SLNID, ± std over seeds."] = _pairs(drawn)
    return made


def _pairs(drawn: Sequence[tuple[Cell, Cell | None]]) -> Figure:
    with style():
        figure = Figure(figsize=(WIDTH, 0.34 * len(drawn) + 1.1), layout="constrained")
        figure.set_label("Every method alone and with SLNID")
        axes = figure.add_subplot()
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)
        y = np.arange(len(drawn))[::-1]
        for at_y, (alone, inhibited) in zip(y, drawn, strict=True):
            if inhibited is not None and alone["mean"] is not None and inhibited["mean"] is not None:
                axes.plot([alone["mean"], inhibited["mean"]], [at_y, at_y], color=INK, alpha=0.3, linewidth=1, zorder=1)
        forms: list[tuple[int, str, dict[str, Any]]] = [
            (0, "alone", {"color": COLOURS[6], "markerfacecolor": "none"}),
            (1, "with SLNID", {"color": COLOURS[0]}),
        ]
        for side, label, form in forms:
            found = [(p, pair[side]) for p, pair in zip(y, drawn, strict=True)]
            known = [(p, c) for p, c in found if c is not None and c["mean"] is not None]
            if known:
                x, stds = [c["mean"] for _, c in known], [c["std"] or 0.0 for _, c in known]
                axes.errorbar(x, [p for p, _ in known], xerr=stds, fmt="o", clip_on=False, capsize=2.5, label=label, **form)
        axes.set_yticks(y, [alone["row"] for alone, _ in drawn])
        axes.set_ylim(-0.6, len(drawn) - 0.4)
        axes.margins(x=0.08)
        end_at_100(axes, "x")
        axes.set_xlabel(value_label(drawn[0][0]))
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, handlelength=1.6)
    return figure
