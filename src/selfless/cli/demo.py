"""`selfless demo`: the main result of the paper on five permuted-MNIST tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from selfless.cli.errors import reporting_errors
from selfless.cli.options import AsJson, DataDir, Device, Force, Workers
from selfless.cli.results import show_results
from selfless.cli.training import train_with_progress

EXAMPLES = "Example:  selfless demo --out demo"


def demo(
    out: Annotated[Path, typer.Option(help="Folder for results, pictures and the report.")] = Path("demo"),
    data_dir: DataDir = None,
    device: Device = None,
    workers: Workers = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two tasks, one epoch each: only to see that it works.")] = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Compare MAS with MAS + SLNID on five permuted-MNIST tasks: a table, pictures and a report."""
    with reporting_errors(as_json):
        from selfless.preserve import MAS
        from selfless.runner import TrainOptions
        from selfless.sparsify import SLNID, NoSparsifier
        from selfless.spec import Run

        tasks, epochs = (2, 1) if quick else (5, 10)
        runs = [Run(preserve=MAS(0.1), sparsify=s, tasks=tasks, epochs=epochs) for s in (NoSparsifier(), SLNID(1e-3))]
        options = TrainOptions(out=out, data_dir=data_dir, device=device or "auto", workers=workers, force=force)
        if not as_json:
            typer.echo(f"Learning {tasks} permuted-MNIST tasks one after another, with MAS alone and with MAS + SLNID.", err=True)
        results = train_with_progress(runs, options, as_json=as_json)
        from selfless.report import plots, write

        plots.save_png(plots.per_task(results), out / "accuracy.png")
        plots.save_png(plots.capacity(results), out / "capacity.png")
        path = write(results, out / "report.html", title="selfless: the demo")
        show_results(results, out, as_json)
        if not as_json:
            typer.echo("Both have the same λ_Ω, which was not tuned; if each chooses its strengths, the gain is smaller: docs/results.md")
            typer.echo(f"picture: {out / 'accuracy.png'}\nreport:  {path}")
