"""Figures of results: matplotlib figures without global state; `svg` and `save_png` save them.

Each function takes results and draws one colour per group, means over seeds, and their spread if there are several seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from selfless.report.drawing import (
    INK,
    WIDTH,
    Look,
    end_at_100,
    floor,
    folded,
    legend,
    limit_accuracy,
    looks_of,
    name_ticks,
    panel,
    save_png,
    shorten,
    style,
    svg,
    ticks_height,
)
from selfless.report.groups import Group, Matrix, groups, measured, number
from selfless.report.places import is_numbered, task_names

if TYPE_CHECKING:
    from selfless.spec import Result

__all__ = ["capacity", "figures", "first_task", "looks", "matrices", "matrix", "over_time", "per_task", "save_png", "svg"]


BARS = 90  # more than so many are drawn as points
ROW = {  # sparsifier → the paper's row of that name
    "none": "No-Reg",
    "slnid": "SLNID",
    "decov": "DeCov",
    "l1-rep": "L1-Rep",
    "orth-reg": "OrthReg",
    "l2-wd": "L2-WD",
    "l1-param": "L1-Param",
}


def looks(found: Sequence[Group]) -> list[Look]:
    """Give a method the look that it has in the paper's figures; if two would look alike (two preservers alone), give colours in turn."""
    activations = {"maxout": "Maxout", "lwta": "LWTA"}
    plain = [ROW.get(g.run.sparsify.spelling(), g.run.sparsify.spelling()) for g in found]
    ends = [g.run.model.rpartition("-")[2] for g in found]
    return looks_of([activations.get(end, row) if row == "No-Reg" else row for row, end in zip(plain, ends, strict=True)])


def per_task(results: Sequence[Result]) -> Figure:
    """Draw accuracy on each task after the last one, as the paper's figure 2: one bar per method, std over seeds as error bars."""
    found = groups(results)
    drawn = [(g, look) for g, look in zip(found, looks(found), strict=True) if g.done]
    tasks = max((g.tasks for g, _ in drawn), default=1)
    bars, names = len(drawn) * tasks, _ticks([g for g, _ in drawn], tasks)
    with style():
        labels = [f"{g.label}\u2003{g.average.text(1)}" for g, _ in drawn]
        width = min(max(WIDTH, 0.2 * (bars + tasks) + 0.8), 11)
        figure, axes = panel(width, labels, "Accuracy on each task after the last one", ticks_height(names, width))
        wide = 0.82 / max(len(drawn), 1)
        for i, (group, look) in enumerate(drawn):
            means, stds = (100 * np.array(column) for column in zip(*group.per_task, strict=True))
            at = np.arange(1, group.tasks + 1) + (i - (len(drawn) - 1) / 2) * wide
            hatch = "////" if look.again else None
            if bars > BARS:
                fill = "none" if look.again else look.colour
                axes.plot(at, means, look.marker, color=look.colour, markerfacecolor=fill, label=labels[i], clip_on=False)
            else:
                axes.bar(at, means, wide * 0.92, color=look.colour, hatch=hatch, label=labels[i], linewidth=0)
            if len(group.done) > 1 and bars <= BARS:
                axes.errorbar(at, means, stds, fmt="none", ecolor=INK, elinewidth=1, capsize=1.5)
            for x, mean, std in zip(at, means, np.nan_to_num(stds), strict=True) if bars <= 12 else ():
                axes.annotate(f"{mean:.1f}", (x, min(mean + std, 100)), (0, 2), textcoords="offset points", ha="center", fontsize=8)
        values = [(100 * v.mean, np.nan_to_num(100 * v.std)) for g, _ in drawn for v in g.per_task if not np.isnan(v.mean)]
        low = floor([mean - std for mean, std in values])
        limit_accuracy(axes, low, max([mean + std + (100 - low) * 0.08 for mean, std in values], default=100.0))
        aside = 0.5 + max(0, 3 - tasks) / 2  # a single task does not fill the figure
        axes.set_xlim(1 - aside, tasks + aside)
        for u in range(1, tasks) if bars > BARS else ():
            axes.axvline(u + 0.5, color=INK, alpha=0.12, linewidth=0.8)
        name_ticks(axes, names, width=width)
        axes.set(xlabel="task", ylabel="accuracy (%)" + (f", axis from {low:g}" if low else ""))
        legend(figure, axes, labels)
    return figure


def over_time(results: Sequence[Result]) -> Figure:
    """Draw the average accuracy over the tasks seen so far, after each task; joint training is a dashed level."""

    def seen(group: Group) -> Matrix:
        A = group.accuracy
        return A.mean(2) if A.shape[1] == 1 else np.stack([A[:, t, : t + 1].mean(1) for t in range(A.shape[1])], 1)

    return _lines(results, seen, "average accuracy so far (%)", "Average accuracy over the tasks seen so far, after each task")


def first_task(results: Sequence[Result]) -> Figure:
    """Draw the accuracy on task 1 after each task: the forgetting curve."""
    return _lines(results, lambda g: g.accuracy[:, :, 0], "accuracy on task 1 (%)", "Accuracy on the first task after each task")


def capacity(results: Sequence[Result]) -> Figure:
    """Draw the free parameters (%) after each task, for the methods that measure importance."""

    def free(group: Group) -> Matrix:
        return np.array([[measured(after, "free_parameters") for after in r.capacity] for r in group.done])

    return _lines(results, free, "free parameters (%)", "Free parameters after each task", whole=True)


def matrix(result: Result | Sequence[Result], title: str = "", scale: tuple[float, float] | None = None) -> Figure:
    """Draw A[t, u] in percent, the mean over the results: row t is after learning task t; a field is filled once task u was learnt.

    scale   the accuracies (0 to 1) of the first and the last colour; the range of this matrix unless given
    """
    results = [result] if not isinstance(result, Sequence) else result
    A: Matrix = np.mean([r.accuracy for r in results], axis=0)
    rows, tasks = A.shape
    learnt = (np.arange(tasks) <= np.arange(rows)[:, None]) | (rows == 1)
    low, high = scale or (A[learnt].min(), A[learnt].max())
    shades = LinearSegmentedColormap.from_list("shades", ["#E69F00", "#F3E3B8", "#9CCBE8", "#0072B2"])
    names = _ticks(groups(results), tasks)
    with style():
        size = min(0.46, 9 / tasks)
        beside = 0.07 * max(len(shorten(name)) for name in names)
        width = max(2.2, size * tasks + 0.7 + beside)
        lines = folded(max(2.0, size * tasks + 0.8), [title]) if title else []  # the title is centred over the fields
        below = ticks_height(names, size * tasks + 0.9)
        height = size * rows + 0.75 + below + 0.2 * sum(line.count("\n") + 1 for line in lines)
        figure = Figure(figsize=(width, height), layout="constrained")
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
        name_ticks(axes, names, width=size * tasks + 0.9)
        axes.set_yticks(range(1, rows + 1), ["all"] if rows == 1 else [shorten(name) for name in names[:rows]])
        axes.set(xlabel="accuracy on task", ylabel="learnt" if rows == 1 else "after task", title="".join(lines))
        axes.spines[:].set_visible(False)
    return figure


def matrices(results: Sequence[Result]) -> list[Figure]:
    """Draw one matrix per group, all on one scale."""
    done = [g for g in groups(results) if g.done and g.tasks > 1]
    learnt = [A[t, : t + 1 if len(A) > 1 else None] for g in done for A in [g.accuracy.mean(0)] for t in range(len(A))]
    scale = (min(map(min, learnt)), max(map(max, learnt))) if done else None
    return [matrix(g.done, g.label, scale) for g in done]


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """Return name → figure, for the figures that the results have values for."""
    done = [g for g in groups(results) if g.done]
    made: dict[str, Callable[[Sequence[Result]], Figure]] = {"per-task": per_task} if done else {}
    if any(g.accuracy.shape[1] > 1 for g in done):
        made |= {"over-time": over_time, "first-task": first_task}
    if any(len(r.capacity) > 1 and measured(r.capacity[-1], "free_parameters") >= 0 for g in done for r in g.done):
        made |= {"capacity": capacity}
    return {name: draw(results) for name, draw in made.items()}


def _numbers(tasks: int) -> list[str]:
    return [str(u + 1) for u in range(tasks)]


def _ticks(found: Sequence[Group], tasks: int) -> list[str]:
    """Return what the tasks are called on an axis: by name where all groups agree on names that say more than a number."""
    names = task_names(found)[:tasks]
    if len(names) < tasks or all(is_numbered(u, name) for u, name in enumerate(names)):
        return _numbers(tasks)
    return names


def _lines(results: Sequence[Result], curve: Callable[[Group], Matrix], ylabel: str, alt: str, whole: bool = False) -> Figure:
    """Draw one line of means per group, with a band of ± std. `curve` maps a group to (seeds, tasks)."""
    found = groups(results)
    drawn = [(g, look, 100 * curve(g)) for g, look in zip(found, looks(found), strict=True) if g.done]
    drawn = [(g, look, y) for g, look, y in drawn if y.size and not np.isnan(y).any()]
    tasks = max((g.tasks for g, _, _ in drawn), default=1)
    labels, names = [g.label for g, _, _ in drawn], _ticks([g for g, _, _ in drawn], tasks)
    with style():
        figure, axes = panel(WIDTH, labels, alt, ticks_height(names, WIDTH))
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
        if names == _numbers(tasks):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
        else:
            name_ticks(axes, names, width=WIDTH)
        if whole:
            axes.set_ylim(0, 100)
        else:
            end_at_100(axes)
        axes.set(xlabel="after task", ylabel=ylabel)
        legend(figure, axes, labels)
    return figure
