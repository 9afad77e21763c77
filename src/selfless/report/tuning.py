"""The plot that explains a choice of strengths: held-out accuracy by strength, what a strength may lose, and the chosen one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Panel:
    """One term: its strengths (the first is 0), the scores of each by seed in percent, the chosen number, and how much may be lost.

    beside_best   True if the scores are compared with the best of them, False if with that of strength 0
    """

    title: str
    strengths: Sequence[float]
    scores: Sequence[Sequence[float]]
    chosen: int | None
    allowed: float
    beside_best: bool = False


def plot_tuning(panels: Sequence[Panel]) -> Figure:
    """Return a figure with one panel per term; strength 0 is the dashed line, the band is what may be lost."""
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure

    from selfless.report.drawing import COLOURS, HEIGHT, STYLE, WIDTH

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH * len(panels), HEIGHT), layout="constrained")
        for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
            means = [float(np.mean(row)) for row in panel.scores]
            axes.axhline(means[0], color=COLOURS[6], linestyle="--", label="without" + ", chosen" * (panel.chosen == 0))
            known = [mean for mean in means if not math.isnan(mean)]
            top, of = (max(known, default=math.nan), " of the best") if panel.beside_best else (means[0], "")
            axes.axhspan(top - panel.allowed, top, color=COLOURS[6], alpha=0.2, linewidth=0, label=f"within {panel.allowed:g}{of}")
            axes.plot(panel.strengths[1:], means[1:], color=COLOURS[0], marker="o")
            for strength, row in zip(panel.strengths[1:], panel.scores[1:], strict=True):
                axes.plot([strength] * len(row), row, color=COLOURS[0], marker=".", linestyle="none", alpha=0.5)
            if panel.chosen:
                axes.plot(
                    [panel.strengths[panel.chosen]], [means[panel.chosen]], color=COLOURS[4], marker="*", markersize=14, label="chosen"
                )
            axes.set(xscale="log", xlabel="strength", ylabel="held-out accuracy, %", title=panel.title)
            axes.set_xticks(panel.strengths[1:], [f"{strength:g}" for strength in panel.strengths[1:]])
            axes.set_xticks([], minor=True)
            axes.legend()
    return figure
