"""Histogram: mean activations of first-layer neurons, as in figure 4, bottom."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from selfless.report.drawing import WIDTH, looks_of, style
from selfless.report.figures.details import details, hatch
from selfless.report.records import Record
from selfless.report.wording import text


def histogram(record: Record) -> dict[str, Figure]:
    """Draw how many neurons have which mean activation, one strip per method."""
    drawn = [(c, np.concatenate([np.array(d) for d in details(c)])) for c in record["cells"] if details(c)]
    top = float(np.quantile(np.concatenate([v for _, v in drawn]), 0.99)) or 1.0
    edges = np.linspace(0, top, 31)
    with style():
        figure = Figure(figsize=(WIDTH, 0.85 * len(drawn) + 0.6), layout="constrained")
        figure.set_label("Histogram of mean first-layer activations")
        strips = figure.subplots(len(drawn), sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, (cell, v), look in zip(strips, drawn, looks_of([c["row"] for c, _ in drawn]), strict=True):
            share = 100 * np.histogram(np.clip(v, 0, top), edges)[0] / len(v)
            axes.bar(edges[:-1], share, np.diff(edges) * 0.92, align="edge", color=look.colour, hatch=hatch(cell["row"], look), linewidth=0)
            axes.text(0.99, 0.86, f"{cell['row']}: {text(cell['mean'], 0)} % near zero", transform=axes.transAxes, ha="right", va="top")
            axes.spines["left"].set_visible(False)
            axes.yaxis.set_major_locator(MaxNLocator(2, integer=True))
            axes.grid(axis="y")
        strips[-1].set_xlabel("mean activation on task 1 (last bin: all above)")
        figure.supylabel("neurons (%)", fontsize=10)
    return {"Mean activation of every first-layer neuron over task 1's images, all seeds together.": figure}
