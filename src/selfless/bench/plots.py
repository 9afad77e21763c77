"""How cost grows, as pictures: with the width, the fleet, the tasks and the samples."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from selfless.bench.rows import Row, duration
from selfless.report.drawing import COLOURS, MARKERS, save_png, style, svg

WIDTH, HEIGHT = 5.2, 3.2
Line = tuple[str, list[tuple[float, float]]]  # a label and its points


def save(found: dict[str, Any], folder: Path) -> list[Path]:
    """Every figure there are measurements for, as PNG and as SVG."""
    made = []
    for name, figure in figures(found).items():
        made.append(save_png(figure, folder / f"{name}.png"))
        picture = folder / f"{name}.svg"
        picture.write_text(svg(figure) + "\n", encoding="utf-8")
        made.append(picture)
    return made


def figures(found: dict[str, Any]) -> dict[str, Figure]:
    penalty, scaling = (_timed(found.get(part, [])) for part in ("penalty", "fleet"))
    drawn = {
        "cost-width": (_by_width(penalty), "neurons in a layer", "SLNID and the training step by width"),
        "cost-step-width": (_by(scaling, "width", "n", "step, fleet of {members}"), "neurons in a layer", "A step by width"),
        "cost-fleet": (_by_fleet(_timed(found.get("steps", []))), "runs in the fleet", "A run-step by the size of the fleet"),
        "cost-tasks": (_by(scaling, "tasks", "tasks", "step, fleet of {members}"), "tasks learnt", "A step by the tasks learnt before"),
        "cost-samples": (
            _by(scaling, "samples", "samples", "importance pass, fleet of {members}"),
            "samples of the task",
            "The importance pass by the number of samples",
        ),
    }
    return {name: _figure(lines, what, alt, log=name != "cost-tasks") for name, (lines, what, alt) in drawn.items() if lines}


def _timed(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["seconds"] is not None]


def _by_width(rows: list[Row]) -> list[Line]:
    formula, share = ([r for r in rows if r["kind"] == kind] for kind in ("formula", "share"))
    lines: list[Line] = [
        ("SLNID, forward + backward", [(r["n"], r["seconds"]) for r in formula]),
        ("the same with an N×N matrix", [(r["n"], r["dense_seconds"]) for r in formula if r["dense_seconds"] is not None]),
        ("training step with SLNID", [(r["n"], r["seconds"]) for r in share]),
        ("training step without", [(r["n"], r["without_seconds"]) for r in share]),
    ]
    return [line for line in lines if line[1]]


def _by_fleet(rows: list[Row]) -> list[Line]:
    """A run-step; the dashed line of the same colour is the eager one, which has no fleets."""
    lines: list[Line] = []
    for network in dict.fromkeys(r["network"] for r in rows):
        fleet = [r for r in rows if r["network"] == network and r["members"]]
        if fleet:
            lines.append((f"{network}, run-step", [(r["members"], r["run_step_seconds"]) for r in fleet]))
            lines.append((f"{network}, eager", [(r["members"], r["eager_step_seconds"]) for r in fleet]))
    return lines


def _by(rows: list[Row], kind: str, key: str, label: str) -> list[Line]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for r in rows:
        if r["kind"] == kind:
            lines.setdefault(label.format(**r), []).append((r[key], r["seconds"]))
    return list(lines.items())


def _figure(lines: list[Line], what: str, alt: str, log: bool) -> Figure:
    with style():
        figure = Figure(figsize=(WIDTH, HEIGHT + 0.19 * -(-len(lines) // 2)), layout="constrained")
        figure.set_label(alt)
        axes = figure.add_subplot()
        axes.grid(axis="y")
        axes.spines["left"].set_visible(False)
        for i, (label, points) in enumerate(lines):
            eager = label.endswith(", eager")
            look = i - 1 if eager else i
            x, y = zip(*points, strict=True)
            dashes, marker = ("--", "") if eager else ("-", MARKERS[look])
            axes.plot(x, y, color=COLOURS[look], marker=marker, linestyle=dashes, label=label, clip_on=False)
        _scale(axes, sorted({x for _, points in lines for x, _ in points}), log)
        if not log:
            axes.set_ylim(0)
        axes.set(xlabel=what, ylabel="time")
        figure.legend(
            *axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(2, len(lines)), columnspacing=1.4, handlelength=1.8
        )
    return figure


def _scale(axes: Axes, at: list[float], log: bool) -> None:
    """Ticks where there are measurements; times in the unit that suits them."""
    if log:
        axes.set_xscale("log")
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(at, [f"{x:,.0f}" for x in at])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: duration(seconds) if seconds > 0 else "0"))
