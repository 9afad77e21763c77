"""`selfless run`: train a sequence of tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from selfless.cli.errors import reporting_errors
from selfless.cli.options import with_limit, with_run_options
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


@with_run_options
def run(*, config: Path | None, log: str | None, force: bool, as_json: bool, **flags: Any) -> None:
    """Train a sequence of tasks and report accuracy, forgetting and the capacity that is left.

    A run is identified by its settings: a recorded run is shown and not trained again, and an interrupted run continues.
    """
    with reporting_errors(as_json):
        from selfless.runner.plan import plan

        planned = plan(config, with_limit(flags), force=force)
        if planned.recommended is not None:
            console, run = open_console(stderr=True, quiet=as_json), planned.runs[0]
            inside = "" if run.sparsify.name == "none" else f" with {run.sparsify} in {run.layers} layers"
            used = f"{run.preserve}{inside}, lr {run.lr:g}, {run.schedule}, epochs {run.epochs}"
            lines = f"recommended: {planned.recommended}\nmeasured by: {planned.recommended.measured.command}\nthis run: {used}"
            console.print(lines, soft_wrap=True, highlight=False, markup=False)
        results = train_with_progress(planned.runs, planned.options, as_json=as_json, log=log)
        assert planned.options.out is not None  # `plan` gives every command a folder
        show_results(results, planned.options.out, as_json)
