"""The plot that explains a choice of strengths: held-out accuracy by strength, what a strength may lose, and the chosen one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Panel:
    """One term: its strengths (the first is 0), the scores of each by seed in percent, the chosen number, and how much may be lost."""

    title: str
    strengths: Sequence[float]
    scores: Sequence[Sequence[float]]
    chosen: int | None
    allowed: float


def plot_tuning(panels: Sequence[Panel]) -> Figure:
    """Return a figure with one panel per term; strength 0 is the dashed line, the band below it is what may be lost."""
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure

    from selfless.report.drawing import COLOURS, HEIGHT, STYLE, WIDTH

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH * len(panels), HEIGHT), layout="constrained")
        for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
            reference = float(np.mean(panel.scores[0]))
            axes.axhline(reference, color=COLOURS[6], linestyle="--", label="without")
            axes.axhspan(reference - panel.allowed, reference, color=COLOURS[6], alpha=0.2, linewidth=0, label=f"within {panel.allowed:g}")
            axes.plot(panel.strengths[1:], [float(np.mean(row)) for row in panel.scores[1:]], color=COLOURS[0], marker="o")
            for strength, row in zip(panel.strengths[1:], panel.scores[1:], strict=True):
                axes.plot([strength] * len(row), row, color=COLOURS[0], marker=".", linestyle="none", alpha=0.5)
            if panel.chosen:
                best = float(np.mean(panel.scores[panel.chosen]))
                axes.plot([panel.strengths[panel.chosen]], [best], color=COLOURS[4], marker="*", markersize=14, label="chosen")
            axes.set(xscale="log", xlabel="strength", ylabel="held-out accuracy, %", title=panel.title)
            axes.legend()
    return figure
