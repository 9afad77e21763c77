"""The second part of `selfless tune`: the strength of a preserver, the plot that explains both choices, and the TOML file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from selfless.cli.training import train_with_progress

if TYPE_CHECKING:
    from selfless.experiments.choosing import Selection
    from selfless.experiments.decay import Decay
    from selfless.runner import TrainOptions
    from selfless.spec import Result, Run

WRITTEN = ("stream", "model", "preserve", "sparsify", "epochs", "batch", "optimizer", "lr", "schedule", "layers", "augment", "precision")


@dataclass(frozen=True)
class Stage:
    """What the first part of `tune` chose, and the settings of the second."""

    base: Run
    candidates: Sequence[Run]
    chosen: Selection
    tolerance: float
    drop: float
    extend: int
    seen: int
    seeds: tuple[int, ...]


def finish(
    stage: Stage,
    preserve: str | None,
    strengths: Sequence[float],
    options: TrainOptions,
    plot: Path | None,
    write: Path | None,
    as_json: bool,
    held_out: tuple[int, int] = (0, 0),
) -> None:
    """Choose λ_Ω if a preserver is given, show it, draw the plot and write the file; `held_out`: images of a task, and its classes."""
    if stage.chosen.index is None:
        raise ValueError("every strength failed; try a smaller --lr or smaller --strengths")
    best = stage.candidates[stage.chosen.index]
    found: Decay | None = None
    if preserve is not None:
        found = _decay(dataclasses.replace(best, preserve=preserve), stage, strengths, options, as_json)
        if found.index is None:
            raise ValueError("every strength of the preserver failed; try a smaller --lr or smaller --preserve-strengths")
        best = dataclasses.replace(found.candidates[found.index], tasks=stage.base.tasks, held_out=stage.base.held_out)
        from selfless.cli.tune import nothing_to_suggest

        if nothing := nothing_to_suggest(found.scores, (stage.seen * held_out[0], held_out[1])):
            raise ValueError(f"λ_Ω: {nothing} Nothing was written.")
    _show(stage, found, best, as_json)
    if plot is not None:
        _draw(stage, found, plot)
    if write is not None:
        from selfless.files import write_text

        write_text(write, to_toml(best, tuned=found is not None))
    if not as_json:
        for path, what in ((plot, "The plot"), (write, "The settings")):
            if path is not None:
                typer.echo(f"{what}: {path}")


def _decay(base: Run, stage: Stage, strengths: Sequence[float], options: TrainOptions, as_json: bool) -> Decay:
    """Train the preserver at every strength, and at the next one while the best one stands at an end of them; return the choice."""
    from selfless.experiments.decay import choose_decay, decay_runs, next_strength

    results: dict[Run, Result] = {}
    tried = list(strengths)
    while True:
        trials = decay_runs(base, tried, stage.seen, stage.seeds)
        runs = [run for by_seed in trials.values() for run in by_seed if run not in results]
        results |= zip(runs, train_with_progress(runs, options, as_json=as_json), strict=True)
        found = choose_decay(trials, results, stage.drop, strengths)
        more = next_strength(strengths, found.means, stage.extend)
        if more is None:
            return found
        tried.append(more)


def _show(stage: Stage, found: Decay | None, best: Run, as_json: bool) -> None:
    """Print both choices, as JSON or as a table of the second."""
    if as_json:
        rows: list[dict[str, Any]] = []
        sides = [("sparsify", stage.candidates, stage.chosen.scores)]
        sides += [("preserve", found.candidates, found.scores)] if found is not None else []
        for kind, candidates, scores in sides:
            for run, row in zip(candidates, scores, strict=True):
                term = getattr(run, kind)
                rows.append({"kind": kind, "strength": term.fixed_strength, "scores": [s if s == s else None for s in row]})
        chosen = {"preserve": str(best.preserve) if found is not None else None, "sparsify": str(best.sparsify)}
        typer.echo(json.dumps({"tolerance": stage.tolerance, "drop": stage.drop, "candidates": rows, "chosen": chosen}))
        return
    if found is None:
        return
    from rich.console import Console
    from rich.table import Table

    from selfless.cli.tune import caution
    from selfless.metrics import spread

    table = Table(title=f"Held-out accuracy on tasks 1 to {stage.seen} (%), with {best.sparsify}", title_justify="left")
    table.add_column("preserver")
    for heading in ("accuracy", "± std"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for i, (run, row) in enumerate(zip(found.candidates, found.scores, strict=True)):
        mean, std = spread(row)
        cells = ["failed", "–"] if mean != mean else [f"{mean:.2f}", f"{std:.2f}" if std == std else "–"]
        mark = f"← largest within {stage.drop:g} points of the best" if stage.drop else "← best"
        table.add_row(str(run.preserve), *cells, mark if i == found.index else "")
    console = Console()
    console.print(table)
    console.print(f"Suggested: --preserve {best.preserve} --sparsify {best.sparsify}{caution(len(stage.seeds))}", highlight=False)
    end = {1: "smallest that was tried; smaller", len(found.candidates) - 1: "largest that was tried; larger"}.get(found.index or 0)
    if end is not None:
        console.print(f"{best.preserve} is the {end} ones may be as good or better: --preserve-strengths", highlight=False)


def _draw(stage: Stage, found: Decay | None, path: Path) -> None:
    from selfless.report.drawing import save_png
    from selfless.report.tuning import Panel, plot_tuning

    by_strength = [run.sparsify.fixed_strength for run in stage.candidates]
    panels = [Panel(f"λ of {stage.base.sparsify.name}, task 1", by_strength, stage.chosen.scores, stage.chosen.index, stage.tolerance)]
    if found is not None:
        strengths = [run.preserve.fixed_strength for run in found.candidates]
        title = f"λ_Ω of {found.candidates[0].preserve.name}, tasks 1 to {stage.seen}"
        panels.append(Panel(title, strengths, found.scores, found.index, stage.drop, beside_best=True))
    save_png(plot_tuning(panels), path)


def to_toml(run: Run, tuned: bool = True) -> str:
    """Return the settings of a run as a file for `selfless run --config`; `tuned`: the strength of the preserver was chosen."""
    lines = ["# written by selfless tune; use it with: selfless run --config FILE"]
    for name in WRITTEN:
        value = getattr(run, name)
        if name == "preserve" and not tuned:
            lines.append("# preserve: not tuned; add --preserve to selfless tune, or to selfless run")
            continue
        lines.append(f"{name} = {value if isinstance(value, int | float) else json.dumps(str(value), ensure_ascii=False)}")
    if run.stream_options:
        lines += [
            "",
            *(["# only so many images of a task were used; delete limit to train on all"] if "limit" in run.stream_options else []),
            "[stream_options]",
            *(f"{name} = {json.dumps(value)}" for name, value in run.stream_options.items()),
        ]
    return "\n".join(lines) + "\n"
