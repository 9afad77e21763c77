"""`selfless run`: train a sequence of tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from selfless.cli.errors import reporting_errors
from selfless.cli.options import HOW, Address, AsJson, DataDir, Device, Engine, Force, Out, Workers, with_run_fields
from selfless.cli.results import show_results
from selfless.cli.terminal import open_console
from selfless.cli.training import train_with_progress

EXAMPLES = """[bold]Examples[/bold]

  selfless run                                                     [dim]# five permuted-MNIST tasks with MAS[/dim]
  selfless run --sparsify slnid:1e-3 --seeds 5                     [dim]# mean ± std over five seeds[/dim]
  selfless run --preserve mas:auto --sparsify slnid:auto           [dim]# strengths measured in the first task[/dim]
  selfless run --preserve recommended                              [dim]# the best measured methods for such tasks, and why[/dim]
  selfless run --preserve mas:0.1,estimator=per-batch              [dim]# the authors' estimate of Ω[/dim]
  selfless run --stream split-cifar-100 --model cnn-256 --tasks 10 --epochs 50 --preserve mas:1 --sparsify slnid:3e-3
  selfless run --preserve lwf:1 --stream split-mnist --scenario class            [dim]# one head over all classes seen so far[/dim]
  selfless run --preserve replay:1,samples=200 --stream split-mnist --scenario class   [dim]# a baseline that uses old data[/dim]
  selfless run --stream folders:my/tasks --model mypkg.nets:build  [dim]# your data and your network[/dim]
  selfless run --continue results/KEY --stream folders:my/next     [dim]# a trained network learns more tasks[/dim]
  selfless run --log tensorboard                                   [dim]# also wandb, mlflow: files in the folder of results[/dim]
  selfless run --seeds 200 --engine ray --address auto              [dim]# on the nodes of a Ray cluster[/dim]
  selfless run --config my.toml --lr 0.03 --json"""


@with_run_fields
def run(
    seeds: Annotated[int | None, typer.Option(help="How many seeds, from --seed up.", show_default="1", rich_help_panel="Training")] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="How many images of each task: --stream-option limit=N.", show_default="all", rich_help_panel="What"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with the flags of What and Training, seeds, out, data_dir, device, workers, budget, checkpoints, "
            "deterministic, engine, address; flags override it.",
            rich_help_panel=HOW,
        ),
    ] = None,
    out: Out = None,
    data_dir: DataDir = None,
    device: Device = None,
    workers: Workers = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="How much data to keep in memory, e.g. 2GB; larger data is read from a memory map.",
            show_default="all",
            rich_help_panel=HOW,
        ),
    ] = None,
    checkpoints: Annotated[
        bool | None,
        typer.Option(help="Record the trained networks too; they are a few times as large as the parameters.", rich_help_panel=HOW),
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option("--deterministic", help="The same bits in every training on one GPU; slower.", rich_help_panel=HOW),
    ] = None,
    log: Annotated[
        str | None,
        typer.Option(
            help="Send losses, penalties, accuracies, capacity, importances to tensorboard, wandb or mlflow.", rich_help_panel=HOW
        ),
    ] = None,
    engine: Engine = None,
    address: Address = None,
    force: Force = False,
    as_json: AsJson = False,
    **fields: Any,
) -> None:
    """Train a sequence of tasks and report accuracy, forgetting and the capacity that is left.

    A run is identified by its settings: a recorded run is shown and not trained again, and an interrupted run continues.
    """
    with reporting_errors(as_json):
        from selfless.runner.plan import plan

        if limit is not None:
            fields["stream_options"] = [*(fields.get("stream_options") or []), f"limit={limit}"]
        how = {"out": out, "data_dir": data_dir, "device": device, "workers": workers, "budget": budget, "checkpoints": checkpoints}
        how |= {"deterministic": deterministic, "engine": engine, "address": address}
        planned = plan(config, {**fields, "seeds": seeds, **how}, force=force)
        if planned.recommended is not None:
            console, run = open_console(stderr=True, quiet=as_json), planned.runs[0]
            inside = "" if run.sparsify.name == "none" else f" with {run.sparsify} in {run.layers} layers"
            used = f"{run.preserve}{inside}, lr {run.lr:g}, {run.schedule}, epochs {run.epochs}"
            lines = f"recommended: {planned.recommended}\nmeasured by: {planned.recommended.measured.command}\nthis run: {used}"
            console.print(lines, soft_wrap=True, highlight=False, markup=False)
        results = train_with_progress(planned.runs, planned.options, as_json=as_json, log=log)
        assert planned.options.out is not None  # `plan` gives every command a folder
        show_results(results, planned.options.out, as_json)
