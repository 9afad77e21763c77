"""`selfless tune`: the paper's rule of thumb for λ, by one fleet. Heavy imports happen inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfless.cli_common import HOW, AsJson, DataDir, Device, Force, Workers, told, trained

if TYPE_CHECKING:
    from selfless.spec import Run

EXAMPLES = """[bold]Examples[/bold]

  selfless tune                                    [dim]# λ for five permuted-MNIST tasks and mlp-128[/dim]
  selfless tune --stream split-cifar-100 --model cnn-256 --epochs 50 --strengths 1e-4,1e-3,1e-2"""


def tune(
    stream: Annotated[str, typer.Option(help="The stream whose first task is tried.")] = "permuted-mnist",
    model: Annotated[str, typer.Option(help="The network.")] = "mlp-128",
    sparsify: Annotated[str, typer.Option(help="The sparsifier whose strength is sought.")] = "slnid",
    strengths: Annotated[str, typer.Option(help="The grid, separated by commas.")] = "1e-5,3e-5,1e-4,3e-4,1e-3,3e-3,1e-2,3e-2",
    tolerance: Annotated[float, typer.Option(min=0, help="Points below the unregularised accuracy that still count as keeping it.")] = 0.5,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    batch: Annotated[int, typer.Option(min=1)] = 200,
    lr: Annotated[float, typer.Option()] = 1e-2,
    schedule: Annotated[str, typer.Option(help="constant, cosine.")] = "constant",
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many images of the task.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 up.")] = 2,
    out: Annotated[Path, typer.Option(help="Where results are recorded and looked up.", rich_help_panel=HOW)] = Path("results/tune"),
    data_dir: DataDir = None,
    device: Device = None,
    workers: Workers = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """The paper's rule of thumb for λ: the strength that keeps the first task's accuracy, found by one fleet on held-out data.

    The paper says the smallest that does, and means the one that leaves most room: the largest. Both are shown; the largest is suggested.
    """
    with told(as_json):
        from selfless.experiments.base import Choice
        from selfless.experiments.choosing import choose, trials
        from selfless.experiments.rule import tuning
        from selfless.spec import Run

        base = Run(
            stream=stream,
            model=model,
            sparsify=sparsify,  # type: ignore[arg-type]
            epochs=epochs,
            batch=batch,
            lr=lr,
            schedule=schedule,  # type: ignore[arg-type]
            stream_options={} if limit is None else {"limit": limit},
        )
        grid = _numbers(strengths)
        cell = tuning(base, grid, Choice("rule-largest", tuple(range(seeds)), tolerance=tolerance))
        runs = list(dict.fromkeys(trials(cell)))
        session = {"data_dir": data_dir, "device": device or "auto", "workers": workers}
        results = dict(zip(runs, trained(runs, force=force, as_json=as_json, out=out, **session), strict=True))
        largest = choose(cell, results)
        smallest = choose(tuning(base, grid, Choice("rule-smallest", tuple(range(seeds)), tolerance=tolerance)), results)
        _tuned(cell.candidates, largest.scores, largest.index, smallest.index, tolerance, as_json)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        found = tuple(sorted({float(word) for word in text.split(",")}))
    except ValueError:
        raise ValueError(f"--strengths is {text!r}; write numbers separated by commas, as 1e-4,1e-3,1e-2") from None
    if not found or found[0] <= 0:
        raise ValueError(f"--strengths is {text!r}; every strength must be above 0 (no inhibition is tried anyway)")
    return found


def _tuned(
    candidates: Sequence[Run],
    scores: Sequence[Sequence[float]],
    largest: int | None,
    smallest: int | None,
    tolerance: float,
    as_json: bool,
) -> None:
    from selfless.metrics import spread

    means = [spread(row) for row in scores]
    reference = means[0][0]
    kept = [mean >= reference - tolerance for mean, _ in means]  # False for a failed run's NaN
    if largest is None or smallest is None:
        raise ValueError("every strength failed; try a smaller --lr or smaller --strengths")
    if as_json:
        rows = [
            {
                "method": str(run.sparsify),
                "strength": run.sparsify.strength,
                "scores": [s if s == s else None for s in row],
                "keeps": bool(ok),
            }
            for run, row, ok in zip(candidates, scores, kept, strict=True)
        ]
        picked = {"largest": candidates[largest].sparsify.strength, "smallest": candidates[smallest].sparsify.strength}
        typer.echo(json.dumps({"tolerance": tolerance, "candidates": rows, **picked, "kept_any": any(kept[1:])}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Held-out accuracy on the first task (%)", title_justify="left")
    table.add_column("sparsifier")
    for heading in ("accuracy", "± std", "to none"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for i, (run, (mean, std), ok) in enumerate(zip(candidates, means, kept, strict=True)):
        mark = "← largest that keeps it" if i == largest and any(kept[1:]) else "← smallest" if i == smallest and any(kept[1:]) else ""
        texts = (
            [f"{mean:.2f}", f"{std:.2f}" if std == std else "–", f"{mean - reference:+.2f}" if i else ""]
            if mean == mean
            else ["failed", "–", ""]
        )
        table.add_row(str(run.sparsify), *texts, mark, style=None if ok else "dim")
    console = Console()
    console.print(table)
    if len({mean for mean, _ in means}) == 1:
        console.print(
            "Nothing to suggest: every strength gives the same. Was anything learnt? Train longer, or on more data.", highlight=False
        )
    elif any(kept[1:]):
        console.print(f"Suggested: --sparsify {candidates[largest].sparsify}", highlight=False)
    else:
        console.print(
            f"No strength keeps the accuracy within {tolerance:g} points; the weakest is {candidates[smallest].sparsify}", highlight=False
        )
