"""Gain: accuracy with and without SLNID by λ_Ω, and the difference beside the published one; bars for columns without a λ_Ω."""

from __future__ import annotations

import re

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from selfless.metrics import paired_t_interval
from selfless.report.drawing import COLOURS, WIDTH, style
from selfless.report.figures.bars import bars
from selfless.report.records import Record, by_place, rows_and_columns

AT = re.compile(r"(.*), λ_Ω = (\S+)")


def gain(record: Record) -> dict[str, Figure]:
    """Draw bars of the chosen strengths, and one figure per network with the curve over λ_Ω."""
    plain = record | {"cells": [cell for cell in record["cells"] if not AT.fullmatch(cell["column"])]}
    made = bars(plain)
    swept: dict[str, list[tuple[float, str]]] = {}
    for column in rows_and_columns(record)[1]:
        if found := AT.fullmatch(column):
            swept.setdefault(found[1], []).append((float(found[2]), column))
    published = {part["a"][1]: part["published"] for claim in record["claims"] for part in claim["parts"] if part["published"] is not None}
    for network, points in swept.items():
        made[f"{network}: accuracy by λ_Ω (above), and what SLNID adds (below); 95 % intervals."] = _curve(
            record, points, published.get(network)
        )
    return made


def _curve(record: Record, points: list[tuple[float, str]], published: float | None) -> Figure:
    cells = by_place(record)
    with style():
        figure = Figure(figsize=(WIDTH, 5.0), layout="constrained")
        figure.set_label("Accuracy and gain by λ_Ω")
        strips: list[Axes] = list(figure.subplots(2, sharex=True))
        x = [anchor for anchor, _ in points]
        for row, colour, label in (("No-Reg", COLOURS[6], "EWC alone"), ("SLNID", COLOURS[0], "with SLNID")):
            found = [cells[row, column] for _, column in points]
            strips[0].errorbar(
                x, [c["mean"] for c in found], [c["std"] or 0 for c in found], color=colour, marker="o", capsize=2.5, label=label
            )
        means, errors = zip(*(_difference(cells["SLNID", column], cells["No-Reg", column]) for _, column in points), strict=True)
        strips[1].errorbar(x, means, errors, color=COLOURS[4], marker="o", capsize=2.5, label="what SLNID adds")
        strips[1].axhline(0, color=COLOURS[6], linewidth=0.8)
        if published is not None:
            strips[1].axhline(published, color=COLOURS[2], linestyle="--", label=f"published, +{published:g}")
        for axes, title in zip(strips, ("average accuracy (%)", "difference (points)"), strict=True):
            axes.set_xscale("log")
            axes.set_xticks(x, [f"{anchor:g}" for anchor in x])
            axes.set_xticks([], minor=True)
            axes.set_title(title, loc="left")
            axes.grid(axis="y")
            axes.legend(loc="best")
        strips[1].set_xlabel("λ_Ω")
    return figure


def _difference(a: dict[str, object], b: dict[str, object]) -> tuple[float, float]:
    """Return the mean of a − b over seeds, and half of its 95 % interval; 0 for one seed."""
    x, y = ({run["seed"]: run["value"] for run in c["runs"] if run["value"] is not None} for c in (a, b))  # type: ignore[attr-defined]
    seeds = sorted(x.keys() & y.keys())
    mean = sum(x[s] - y[s] for s in seeds) / len(seeds)
    low, high = paired_t_interval([x[s] for s in seeds], [y[s] for s in seeds])
    return mean, (high - low) / 2 if high == high else 0.0
