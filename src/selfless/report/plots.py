"""The numbers as pictures: matplotlib figures with no global state, colour-blind safe, legible on dark and on light.

Colours are Okabe and Ito's; marker and hatch repeat what colour says. Text and axes are drawn in INK, which `svg` turns into
currentColor, so that a page's own colour scheme decides; `save_png` puts them on white.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from selfless.report.groups import Group, Matrix, groups, measured, number

if TYPE_CHECKING:
    from selfless.spec import Result

INK = "#2f3742"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8A8F98")
MARKERS = "osD^vPX"
STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "xtick.bottom", "ytick.left", "legend.frameon"), False),
    **dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize", "legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 10),
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.alpha": 0.18,
    "hatch.linewidth": 0.8,
    "hatch.color": "white",
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "text.parse_math": False,  # a label is never a formula
    "svg.fonttype": "none",  # real text: small, searchable, in the page's own font
    "svg.hashsalt": "selfless",
}
WIDTH, HEIGHT = 5.2, 3.0  # inches; at most what a phone shows without shrinking the type


class Look(NamedTuple):
    """How one group is drawn, in every figure the same."""

    colour: str
    marker: str
    again: bool  # the colours went round: hatched, dashed


def looks(found: Sequence[Group]) -> list[Look]:
    n = len(COLOURS)
    return [Look(COLOURS[i % n], MARKERS[(i + i // n) % n], i >= n) for i in range(len(found))]


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """Our settings and the defaults for the rest, whatever the user's matplotlibrc says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def per_task(results: Sequence[Result]) -> Figure:
    """The paper's figure 2: accuracy on each task after the last one, a bar a method; averages in the legend, std over seeds as bars."""
    found = groups(results)
    drawn = [(g, look) for g, look in zip(found, looks(found), strict=True) if g.done]
    tasks = max((g.tasks for g, _ in drawn), default=1)
    bars = len(drawn) * tasks
    with _style():
        labels = [f"{g.label}\u2003{g.average.text(1)}" for g, _ in drawn]
        figure, axes = _figure(min(max(WIDTH, 0.2 * (bars + tasks) + 0.8), 11), labels, "Accuracy on each task after the last one")
        wide = 0.82 / max(len(drawn), 1)
        for i, (group, look) in enumerate(drawn):
            means, stds = (100 * np.array(column) for column in zip(*group.per_task, strict=True))
            at = np.arange(1, group.tasks + 1) + (i - (len(drawn) - 1) / 2) * wide
            hatch = "////" if look.again else None
            axes.bar(at, means, wide * 0.92, color=look.colour, hatch=hatch, label=labels[i], linewidth=0)
            axes.errorbar(at, means, np.nan_to_num(stds), fmt="none", ecolor=INK, elinewidth=1, capsize=1.5)
            for x, mean, std in zip(at, means, np.nan_to_num(stds), strict=True) if bars <= 12 else ():
                axes.annotate(f"{mean:.1f}", (x, mean + std), (0, 2), textcoords="offset points", ha="center", fontsize=8)
        values = [(100 * v.mean, np.nan_to_num(100 * v.std)) for g, _ in drawn for v in g.per_task]
        low = _floor([mean - std for mean, std in values])
        axes.set_ylim(low, max([min(104.0, mean + std + (100 - low) * 0.08) for mean, std in values], default=100))
        axes.set_yticks([tick for tick in MaxNLocator(6, steps=[1, 2, 5, 10], integer=True).tick_values(low, 100) if low <= tick <= 100])
        axes.set_xticks(range(1, tasks + 1), [str(u) for u in range(1, tasks + 1)])
        axes.set(xlabel="task", ylabel="accuracy (%)" + (f", axis from {low:g}" if low else ""))
        _legend(figure, axes, labels)
    return figure


def over_time(results: Sequence[Result]) -> Figure:
    """Average accuracy over the tasks seen so far, after each task; joint training, learnt at once, as a dashed level."""

    def seen(group: Group) -> Matrix:
        A = group.accuracy
        return A.mean(2) if A.shape[1] == 1 else np.stack([A[:, t, : t + 1].mean(1) for t in range(A.shape[1])], 1)

    return _lines(results, seen, "average accuracy so far (%)", "Average accuracy over the tasks seen so far, after each task")


def first_task(results: Sequence[Result]) -> Figure:
    """Accuracy on task 1 after each task: the forgetting curve."""
    return _lines(results, lambda g: g.accuracy[:, :, 0], "accuracy on task 1 (%)", "Accuracy on the first task after each task")


def capacity(results: Sequence[Result]) -> Figure:
    """Free parameters (%) after each task, of the methods that measure importance."""

    def free(group: Group) -> Matrix:
        return np.array([[measured(after, "free_parameters") for after in r.capacity] for r in group.done])

    return _lines(results, free, "free parameters (%)", "Free parameters after each task", whole=True)


def matrix(result: Result | Sequence[Result], title: str = "") -> Figure:
    """A[t, u] in percent, the mean over what is given: rows are after learning task t, filled where task u was learnt by then."""
    results = [result] if not isinstance(result, Sequence) else result
    A: Matrix = np.mean([r.accuracy for r in results], axis=0)
    rows, tasks = A.shape
    learnt = (np.arange(tasks) <= np.arange(rows)[:, None]) | (rows == 1)
    low, high = A[learnt].min(), A[learnt].max()
    shades = LinearSegmentedColormap.from_list("shades", ["#E69F00", "#F3E3B8", "#9CCBE8", "#0072B2"])
    with _style():
        size = min(0.46, 9 / tasks)
        figure = Figure(figsize=(max(2.2, size * tasks + 0.8), size * rows + 0.75 + 0.2 * bool(title)), layout="constrained")
        figure.set_label(f"Accuracy matrix {title}".strip())
        axes = figure.add_subplot(aspect="equal", xlim=(0.5, tasks + 0.5), ylim=(rows + 0.5, 0.5))
        for (t, u), value in np.ndenumerate(A):
            shade = shades((value - low) / (high - low) if high > low else 1.0)
            if learnt[t, u]:
                axes.add_patch(Rectangle((u + 0.53, t + 0.53), 0.94, 0.94, facecolor=shade, linewidth=0))
            light = np.dot(shade[:3], (0.299, 0.587, 0.114)) > 0.5
            colour = INK if not learnt[t, u] else "#101418" if light else "white"
            text = "" if np.isnan(value) else number(value, int(tasks <= 12))
            alpha = 1 if learnt[t, u] else 0.6
            axes.text(u + 1, t + 1, text, ha="center", va="center_baseline", color=colour, alpha=alpha, fontsize=8.5 if tasks <= 12 else 7)
        axes.set_xticks(range(1, tasks + 1))
        axes.set_yticks(range(1, rows + 1), ["all"] if rows == 1 else [str(t) for t in range(1, rows + 1)])
        axes.set(xlabel="accuracy on task", ylabel="learnt" if rows == 1 else "after task", title=title)
        axes.spines[:].set_visible(False)
    return figure


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Name → figure, those the results have something for."""
    done = [g for g in groups(results) if g.done]
    made: dict[str, Callable[[Sequence[Result]], Figure]] = {"per-task": per_task} if done else {}
    if any(g.accuracy.shape[1] > 1 for g in done):
        made |= {"over-time": over_time, "first-task": first_task}
    if any(len(r.capacity) > 1 and measured(r.capacity[-1], "free_parameters") >= 0 for g in done for r in g.done):
        made |= {"capacity": capacity}
    return {name: draw(results) for name, draw in made.items()}


def save_png(figure: Figure, path: Path | str, dpi: int = 200) -> Path:
    """On white, so that it reads wherever it is shown."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _drawing():
        figure.savefig(path, format="png", dpi=dpi, facecolor="white")
    return path


def svg(figure: Figure) -> str:
    """The figure as one <svg> element, the same text for the same figure: no background, ink in currentColor, ids of its own."""
    file = io.StringIO()
    with _drawing():
        figure.savefig(file, format="svg", metadata={"Date": None}, facecolor="none")
    text = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
    text = text[text.index("<svg") :].replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:href", "href")
    text = re.sub(r"(?<=px )'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text).replace(INK, "currentColor")
    own = hashlib.sha256(text.encode()).hexdigest()[:8]
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>f{own}-", text)
    alt = html.escape(str(figure.get_label()))
    return text.replace("<svg", f'<svg role="img" aria-label="{alt}" color="#78808c"', 1).strip()


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    with _style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the reader's font may well have it
        yield


def _lines(results: Sequence[Result], curve: Callable[[Group], Matrix], ylabel: str, alt: str, whole: bool = False) -> Figure:
    """curve: group → (seeds, tasks); a line of means with a band of ± std."""
    found = groups(results)
    drawn = [(g, look, 100 * curve(g)) for g, look in zip(found, looks(found), strict=True) if g.done]
    drawn = [(g, look, y) for g, look, y in drawn if y.size and not np.isnan(y).any()]
    tasks = max((g.tasks for g, _, _ in drawn), default=1)
    labels = [g.label for g, _, _ in drawn]
    with _style():
        figure, axes = _figure(WIDTH, labels, alt)
        for group, look, y in drawn:
            mean = y.mean(0)
            if len(mean) == 1 and group.tasks > 1:
                axes.axhline(mean[0], color=look.colour, linestyle="--", label=group.label)
                continue
            x = np.arange(1, len(mean) + 1)
            dashes = (0, (4, 1.5)) if look.again else "-"
            axes.plot(x, mean, color=look.colour, marker=look.marker, linestyle=dashes, label=group.label, clip_on=False)
            if len(y) > 1:
                std = y.std(0, ddof=1)
                axes.fill_between(x, mean - std, mean + std, color=look.colour, alpha=0.18, linewidth=0)
        axes.set_xlim(0.8, tasks + 0.2)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
        if whole:
            axes.set_ylim(0, 100)
        axes.set(xlabel="tasks learnt", ylabel=ylabel)
        _legend(figure, axes, labels)
    return figure


def _figure(width: float, labels: Sequence[str], alt: str) -> tuple[Figure, Axes]:
    rows = -(-len(labels) // _across(width, labels))
    figure = Figure(figsize=(width, HEIGHT + 0.19 * rows), layout="constrained")
    figure.set_label(alt)
    axes = figure.add_subplot()
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    return figure, axes


def _across(width: float, labels: Sequence[str]) -> int:
    """How many legend entries fit side by side: averages included or not, so that figures side by side are of one height."""
    longest = max((len(label.partition("\u2003")[0]) + len("95.83 ± 0.21") for label in labels), default=1)
    return min(max(1, int((72 * width - 20) / (5.7 * longest + 36))), max(1, len(labels)))


def _legend(figure: Figure, axes: Axes, labels: Sequence[str]) -> None:
    if labels:
        across = _across(figure.get_figwidth(), labels)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=across, columnspacing=1.4, handlelength=1.6)


def _floor(values: Sequence[float]) -> float:
    """Where the axis starts: a round number a third of the spread below the lowest value; 0 when that is near."""
    low, high = min(values, default=0.0), max(values, default=100.0)
    step = 10 if high - low > 10 else 5
    start = step * np.floor((low - max((high - low) / 3, 1)) / step)
    return float(start) if start >= 30 else 0.0
