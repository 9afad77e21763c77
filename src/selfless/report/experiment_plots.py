"""The paper's figures redrawn from an experiment's record: bars a task, dots beside published values, curves, histograms, importances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from selfless.report.drawing import (
    COLOURS,
    FUNCTIONS,
    INK,
    PARAMETERS,
    WIDTH,
    Look,
    floor,
    legend,
    looks,
    looks_of,
    panel,
    save_pdf,
    save_png,
    style,
)
from selfless.report.experiments import Record, at, rows_and_columns, text

Cell = dict[str, Any]


def figures(record: Record) -> dict[str, Figure]:
    """Caption → figure; nothing where nothing has run."""
    if not any(cell["mean"] is not None for cell in record["cells"]):
        return {}
    draw: Callable[[Record], dict[str, Figure]] = {
        "bars": bars,
        "dots": dots,
        "pairs": pairs,
        "curves": curves,
        "histogram": histogram,
        "importance": importance,
        "rule": rule,
    }[record["figure"]]
    return draw(record)


def save(records: Sequence[Record], folder: Path) -> list[Path]:
    """Every figure as `<experiment>-<profile>[-2 …].png` and `.pdf` in the folder."""
    written = []
    for record in records:
        name = f"{record['name']}-{record['profile']}{'-quick' * record['quick']}"
        for number, figure in enumerate(figures(record).values(), 1):
            path = folder / (f"{name}-{number}" if number > 1 else name)
            written += [save_png(figure, path.with_name(f"{path.name}.png"), dpi=150), save_pdf(figure, path.with_name(f"{path.name}.pdf"))]
    return written


def details(cell: Cell) -> list[Any]:
    return [run["detail"] for run in cell["runs"] if run["detail"] is not None]


def bars(record: Record) -> dict[str, Figure]:
    """A figure a column whose cells know their tasks: accuracy on each after the last one, a bar a method."""
    _, columns = rows_and_columns(record)
    made = {}
    for column in columns:
        drawn = [c for c in record["cells"] if c["column"] == column and c["value"] == "average" and details(c)]
        if drawn:
            made[f"{column}: accuracy on each task after the last one; averages in the legend."] = _bars(drawn)
    return made


def _bars(drawn: Sequence[Cell]) -> Figure:
    values = [np.array(details(c)) for c in drawn]  # (seeds, tasks) each
    tasks = max(v.shape[1] for v in values)
    labels = [f"{c['row']}\u2003{text(c['mean'], 1)}" + (f" ± {c['std']:.1f}" if c["std"] is not None else "") for c in drawn]
    with style():
        width = min(max(WIDTH, 0.17 * (len(drawn) + 1) * tasks + 0.9), 11)
        figure, axes = panel(width, labels, "Accuracy on each task after the last one")
        wide = 0.84 / len(drawn)
        for i, (cell, v, look) in enumerate(zip(drawn, values, looks_of([c["row"] for c in drawn]), strict=True)):
            place = np.arange(1, v.shape[1] + 1) + (i - (len(drawn) - 1) / 2) * wide
            axes.bar(place, v.mean(0), wide * 0.9, color=look.colour, hatch=_hatch(cell["row"], look), label=labels[i], linewidth=0)
            if len(v) > 1:
                axes.errorbar(place, v.mean(0), v.std(0, ddof=1), fmt="none", ecolor=INK, elinewidth=0.9, capsize=1.2)
        every = [float(x) for v in values for x in v.mean(0)]
        low = floor(every)
        spread = max((float(v.std(0, ddof=1).max()) for v in values if len(v) > 1), default=0.0)
        axes.set_ylim(low, min(104.0, max(every) + spread + 0.04 * (100 - low)))
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
        axes.set_xlim(0.5, tasks + 0.5)
        axes.set_xticks(range(1, tasks + 1))
        axes.set(xlabel="task", ylabel="accuracy (%)" + (f", axis from {low:g}" if low else ""))
        legend(figure, axes, labels)
    return figure


def _hatch(row: str, look: Look) -> str | None:
    return "////" if row in PARAMETERS or look.again else "----" if row in FUNCTIONS else None


def dots(record: Record) -> dict[str, Figure]:
    """A figure a column: ours with its spread over seeds, beside the published value."""
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
        axes.errorbar([c["mean"] for _, c in known], [p for p, _ in known], xerr=stds, fmt="o", color=COLOURS[0], capsize=2.5, label="ours")
        told = [(at_y, c["published"]) for at_y, c in zip(y, drawn, strict=True) if c["published"] is not None]
        if told:
            axes.plot(
                [v for _, v in told], [p for p, _ in told], "D", color=COLOURS[4], markerfacecolor="none", label="published", zorder=3
            )
        axes.set_yticks(y, [c["row"] for c in drawn])
        axes.set_ylim(-0.6, len(drawn) - 0.4)
        axes.margins(x=0.08)
        axes.set_xlabel("accuracy (%)")
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], names[::-1], loc="outside lower center", ncols=2, handlelength=1.6)
    return figure


def pairs(record: Record) -> dict[str, Figure]:
    """Columns "x" and "x + SLNID": a line a method from the one to the other, joint training as a mark above all."""
    _, columns = rows_and_columns(record)
    cells, made = at(record), {}
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
                axes.errorbar(x, [p for p, _ in known], xerr=stds, fmt="o", capsize=2.5, label=label, **form)
        axes.set_yticks(y, [alone["row"] for alone, _ in drawn])
        axes.set_ylim(-0.6, len(drawn) - 0.4)
        axes.margins(x=0.08)
        axes.set_xlabel("accuracy (%)")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, handlelength=1.6)
    return figure


def curves(record: Record) -> dict[str, Figure]:
    """Figure 4, top: free first-layer weights after each task, a line a λ; average accuracy in the legend."""
    cells = at(record)
    rows, _ = rows_and_columns(record)
    drawn = [(cells[row, "free after task 1"], cells[row, "average accuracy"]) for row in rows]
    drawn = [(free, average) for free, average in drawn if details(free)]
    labels = [f"{free['row']}\u2003{text(average['mean'], 1)}" for free, average in drawn]
    with style():
        figure, axes = panel(WIDTH, labels, "Free first-layer weights after each task")
        for (free, _), look, label in zip(drawn, _swept([free["row"] for free, _ in drawn]), labels, strict=True):
            v = np.array(details(free))
            x = np.arange(1, v.shape[1] + 1)
            dashes = "--" if free["row"] == "No-Reg" else "-"
            axes.plot(x, v.mean(0), color=look.colour, marker=look.marker, linestyle=dashes, label=label, clip_on=False)
            if len(v) > 1:
                spread = v.std(0, ddof=1)
                axes.fill_between(x, v.mean(0) - spread, v.mean(0) + spread, color=look.colour, alpha=0.18, linewidth=0)
        axes.set_ylim(0, 100)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
        axes.set(xlabel="tasks learnt", ylabel="free first-layer weights (%)")
        legend(figure, axes, labels)
    return {"Weights of the first layer with Ω < 0.01 after each task, by λ; average accuracy at the end in the legend.": figure}


def _swept(rows: Sequence[str]) -> list[Look]:
    """No-Reg as in every figure, the other colours in turn for the λ."""
    others = iter(looks(rows))
    return [looks_of([row])[0]._replace(marker="X") if row == "No-Reg" else next(others) for row in rows]


def histogram(record: Record) -> dict[str, Figure]:
    """Figure 4, bottom: how many neurons have which mean activation, one strip a method."""
    drawn = [(c, np.concatenate([np.array(d) for d in details(c)])) for c in record["cells"] if details(c)]
    top = float(np.quantile(np.concatenate([v for _, v in drawn]), 0.99)) or 1.0
    edges = np.linspace(0, top, 31)
    with style():
        figure = Figure(figsize=(WIDTH, 0.85 * len(drawn) + 0.6), layout="constrained")
        figure.set_label("Histogram of mean first-layer activations")
        strips = figure.subplots(len(drawn), sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, (cell, v), look in zip(strips, drawn, looks_of([c["row"] for c, _ in drawn]), strict=True):
            share = 100 * np.histogram(np.clip(v, 0, top), edges)[0] / len(v)
            axes.bar(
                edges[:-1], share, np.diff(edges) * 0.92, align="edge", color=look.colour, hatch=_hatch(cell["row"], look), linewidth=0
            )
            axes.text(0.99, 0.86, f"{cell['row']}: {text(cell['mean'], 0)} % near zero", transform=axes.transAxes, ha="right", va="top")
            axes.spines["left"].set_visible(False)
            axes.yaxis.set_major_locator(MaxNLocator(2, integer=True))
            axes.grid(axis="y")
        strips[-1].set_xlabel("mean activation on task 1 (last bin: all above)")
        figure.supylabel("neurons (%)", fontsize=10)
    return {"Mean activation of every first-layer neuron over task 1's images, all seeds together.": figure}


def importance(record: Record) -> dict[str, Figure]:
    """Neuron importance after tasks 1, 2 and 3, one network: in place, and sorted by the first task's."""
    cells = at(record)
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
            own = np.diff(alpha, axis=0, prepend=0.0)  # each task's own share
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


def rule(record: Record) -> dict[str, Figure]:
    """Task 1's held-out accuracy and the average at the end, by λ; what the rule chooses is ringed."""
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
            axes.errorbar(x, y, [c["std"] or 0 for c in found], color=COLOURS[0], marker="o", capsize=2.5, label="SLNID")
            if base.get(column) is not None:
                axes.axhline(base[column], color=COLOURS[6], linestyle="--", label="No-Reg")
            axes.set_xscale("log")
            axes.set_xticks(x, [f"{strength:g}" for strength in x])
            axes.set_xticks([], minor=True)
            axes.set_title(f"{column} (%)", loc="left")
            axes.grid(axis="y")
            axes.spines["left"].set_visible(False)
        for cell, marker, colour, size in zip(picked, "^vD", (COLOURS[2], COLOURS[1], COLOURS[4]), (11, 11, 19), strict=False):
            if cell["strength"]:  # of different sizes: two readings may choose the same λ
                spot: Any = {"markersize": size, "markerfacecolor": "none", "markeredgewidth": 1.6, "linestyle": "none", "clip_on": False}
                strips[-1].plot([cell["strength"]], [cell["mean"]], marker=marker, color=colour, label=cell["row"], **spot)
        strips[-1].set_xlabel("λ")
        for axes in strips:
            axes.margins(x=0.06, y=0.14)
        shown = figure.legend(*strips[-1].get_legend_handles_labels(), loc="outside lower center", ncols=1, handlelength=1.6)
        for handle in shown.legend_handles:
            if isinstance(handle, Line2D) and handle.get_markersize() > 11:
                handle.set_markersize(11)
    return {"Accuracy on held-out images of task 1 (above) and average accuracy at the end (below), by λ.": figure}
