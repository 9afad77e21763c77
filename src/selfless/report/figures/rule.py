"""Rule: accuracy by λ, with the λ that the rule of thumb chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from selfless.report.drawing import COLOURS, WIDTH, end_at_100, style
from selfless.report.records import Record


def rule(record: Record) -> dict[str, Figure]:
    """Draw the held-out accuracy of task 1 and the average at the end, by λ; a ring marks the λ that the rule chooses."""
    swept = [c for c in record["cells"] if c["row"].startswith("λ =") and c["mean"] is not None]
    base = {c["column"]: c["mean"] for c in record["cells"] if c["row"] == "No-Reg"}
    picked = [c for c in record["cells"] if c["row"].startswith(("rule", "best")) and c["mean"] is not None]
    columns = list(dict.fromkeys(c["column"] for c in swept))[::-1]
    with style():
        figure = Figure(figsize=(WIDTH, 5.0), layout="constrained")
        figure.set_label("Accuracy by λ")
        strips: list[Axes] = list(figure.subplots(2, sharex=True))
        for axes, column in zip(strips, columns, strict=False):
            found = [c for c in swept if c["column"] == column]
            x, y = [c["strength"] for c in found], [c["mean"] for c in found]
            axes.errorbar(x, y, [c["std"] or 0 for c in found], color=COLOURS[0], marker="o", clip_on=False, capsize=2.5, label="SLNID")
            if base.get(column) is not None:
                axes.axhline(base[column], color=COLOURS[6], linestyle="--", label="No-Reg")
            axes.set_xscale("log")
            axes.set_xticks(*_decades([c["strength"] for c in (*swept, *picked) if c["strength"]]))
            axes.set_xticks([], minor=True)
            axes.set_title(f"{column} (%)", loc="left")
            axes.grid(axis="y")
            axes.spines["left"].set_visible(False)
        for cell, marker, colour, size in zip(picked, "^vD", (COLOURS[2], COLOURS[1], COLOURS[4]), (11, 11, 19), strict=False):
            if cell["strength"]:  # rings of different sizes, because both readings may choose the same λ
                spot: Any = {"markersize": size, "markerfacecolor": "none", "markeredgewidth": 1.6, "linestyle": "none", "clip_on": False}
                strips[-1].plot([cell["strength"]], [cell["mean"]], marker=marker, color=colour, label=cell["row"], **spot)
        strips[-1].set_xlabel("λ")
        for axes in strips:
            axes.margins(x=0.06, y=0.14)
            end_at_100(axes)
        shown = figure.legend(*strips[-1].get_legend_handles_labels(), loc="outside lower center", ncols=1, handlelength=1.6)
        for handle in shown.legend_handles:
            if isinstance(handle, Line2D) and handle.get_markersize() > 11:
                handle.set_markersize(11)
    return {"Accuracy on held-out images of task 1 (above) and average accuracy at the end (below), by λ.": figure}


def _decades(strengths: Sequence[float]) -> tuple[list[float], list[str]]:
    """Return the powers of ten from the smallest to the largest strength, and their names."""
    low, high = (round(math.log10(end), 9) for end in (min(strengths), max(strengths)))
    powers = range(math.ceil(low), math.floor(high) + 1)
    return [10.0**k for k in powers], [f"10{str(k).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}" for k in powers]
