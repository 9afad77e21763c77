"""Plots of how cost grows with the width, the fleet, the tasks and the samples."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from selfless.bench.growth import AXES, exponent
from selfless.bench.table import Row, format_duration
from selfless.files import write_text
from selfless.report.drawing import COLOURS, MARKERS, save_png, style, svg

WIDTH, HEIGHT = 5.2, 3.2
SPAN = 10.0  # the least ratio of the ends of a logarithmic axis of time, so that noise does not look like growth
Line = tuple[str, list[tuple[float, float]]]  # (label, points)


def save(found: dict[str, Any], folder: Path) -> list[Path]:
    """Write every figure that has measurements as PNG and as SVG; return the files."""
    files = []
    for name, figure in figures(found).items():
        files.append(save_png(figure, folder / f"{name}.png"))
        files.append(folder / f"{name}.svg")
        write_text(files[-1], svg(figure) + "\n")
    return files


def figures(found: dict[str, Any]) -> dict[str, Figure]:
    """Return the figures by file name, those without measurements left out."""
    steps, penalty, scaling = (_with_times(found.get(part, [])) for part in ("steps", "penalty", "fleet"))
    content = {  # (lines, label of the x axis, description)
        "cost-width": (_penalty_lines(penalty), "neurons in a layer", "SLNID and the training step by width"),
        "cost-step-width": (_lines(scaling, "width", "n", "step, fleet of {members}"), "neurons in a layer", "A step by width"),
        "cost-fleet": (_fleet_lines(steps), "runs in the fleet", "A run-step by the size of the fleet"),
        "cost-tasks": (_lines(scaling, "tasks", "tasks", "step, fleet of {members}"), "tasks learnt", "A step by the tasks learnt before"),
        "cost-samples": (
            _lines(scaling, "samples", "samples", "importance pass, fleet of {members}"),
            "samples of the task",
            "The importance pass by the number of samples",
        ),
    }
    grown = found.get("growth", [])
    content |= {f"growth-{axis}": (_growth_line(grown, axis), label, f"Time by {label}") for axis, (label, _) in AXES.items()}
    return {name: _draw(lines, label, alt, log=name != "cost-tasks") for name, (lines, label, alt) in content.items() if lines}


def _growth_line(rows: Iterable[Row], axis: str) -> list[Line]:
    """Return the times of one axis of the part "growth"; the label says the exponent of the larger half."""
    points = [(r["size"], r["seconds"]) for r in _with_times(rows) if r["axis"] == axis]
    return [(f"{AXES[axis][1]}, exponent {exponent(points):.2f} in the larger half", points)] if len(points) > 1 else []


def _with_times(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that were measured, not those that did not fit in memory."""
    return [row for row in rows if row["seconds"] is not None]


def _penalty_lines(rows: list[Row]) -> list[Line]:
    formula, share = ([r for r in rows if r["kind"] == kind] for kind in ("formula", "share"))
    lines: list[Line] = [
        ("SLNID, forward + backward", [(r["n"], r["seconds"]) for r in formula]),
        ("the same with an N×N matrix", [(r["n"], r["dense_seconds"]) for r in formula if r["dense_seconds"] is not None]),
        ("training step with SLNID", [(r["n"], r["seconds"]) for r in share]),
        ("training step without", [(r["n"], r["without_seconds"]) for r in share]),
    ]
    return [line for line in lines if line[1]]


def _fleet_lines(rows: list[Row]) -> list[Line]:
    """Two lines for each network: a run-step of the fleet, and a step of eager PyTorch, which is the same at every fleet size."""
    lines: list[Line] = []
    for network in dict.fromkeys(r["network"] for r in rows):
        fleet = [r for r in rows if r["network"] == network and r["members"]]
        if fleet:
            lines.append((f"{network}, run-step", [(r["members"], r["run_step_seconds"]) for r in fleet]))
            lines.append((f"{network}, eager", [(r["members"], r["eager_step_seconds"]) for r in fleet]))
    return lines


def _lines(rows: list[Row], kind: str, key: str, label: str) -> list[Line]:
    """Return the seconds of the rows of one kind over `key`, one line for each label; `label` is filled in from the row."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for r in rows:
        if r["kind"] == kind:
            lines.setdefault(label.format(**r), []).append((r[key], r["seconds"]))
    return list(lines.items())


def _draw(lines: list[Line], label: str, alt: str, log: bool) -> Figure:
    """Draw the lines, with logarithmic axes if `log`. An eager line is dashed and has the colour of the line before it."""
    with style():
        figure = Figure(figsize=(WIDTH, HEIGHT + 0.19 * -(-len(lines) // 2)), layout="constrained")
        figure.set_label(alt)
        axes = figure.add_subplot()
        axes.grid(axis="y")
        axes.spines["left"].set_visible(False)
        for i, (name, points) in enumerate(lines):
            is_eager = name.endswith(", eager")
            look = i - 1 if is_eager else i
            x, y = zip(*points, strict=True)
            dashes, marker = ("--", "") if is_eager else ("-", MARKERS[look])
            axes.plot(x, y, color=COLOURS[look], marker=marker, linestyle=dashes, label=name, clip_on=False)
        _set_scales(axes, sorted({x for _, points in lines for x, _ in points}), log)
        if not log:
            axes.set_ylim(0)
        axes.set(xlabel=label, ylabel="time")
        figure.legend(
            *axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(2, len(lines)), columnspacing=1.4, handlelength=1.8
        )
    return figure


def _set_scales(axes: Axes, ticks: list[float], log: bool) -> None:
    """Put the ticks of x where measurements are, and write times in a suitable unit."""
    if log:
        axes.set_xscale("log")
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        wider = max(1.0, (SPAN * low / high) ** 0.5)
        low, high = axes.set_ylim(low / wider, high * wider)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [f"{x:,.0f}" for x in ticks])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: format_duration(seconds) if seconds > 0 else "0"))
