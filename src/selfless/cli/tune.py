"""`selfless tune`: choose λ by the paper's rule of thumb, with one fleet."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfless.cli.errors import reporting_errors
from selfless.cli.options import HOW, Address, AsJson, DataDir, Device, Engine, Force, Workers
from selfless.cli.terminal import open_console
from selfless.cli.training import train_with_progress

if TYPE_CHECKING:
    from selfless.spec import Result, Run
    from selfless.terms import Term

EXAMPLES = """[bold]Examples[/bold]

  selfless tune                                    [dim]# λ of SLNID by the first permuted-MNIST task, mlp-128[/dim]
  selfless tune --stream split-cifar-100 --model cnn-256 --epochs 50 --strengths 1e-4,1e-3,1e-2
  selfless tune --sparsify slnid:1e-3+decov:1e-4   [dim]# the larger strength is chosen, 10 : 1 stays[/dim]
  selfless tune --preserve lwf --plot tune.png --write mine.toml    [dim]# λ_Ω too; then: selfless run --config mine.toml[/dim]"""

SURE = 0.05  # an accuracy that guessing reaches more often than this does not show that something was learnt


def tune(
    stream: Annotated[str, typer.Option(help="The stream whose first tasks are learned.")] = "permuted-mnist",
    model: Annotated[str, typer.Option(help="The network.")] = "mlp-128",
    sparsify: Annotated[str, typer.Option(help="The sparsifier whose strength is chosen; the parts of a sum keep their ratio.")] = "slnid",
    strengths: Annotated[str, typer.Option(help="The grid of strengths, separated by commas.")] = "1e-5,3e-5,1e-4,3e-4,1e-3,3e-3,1e-2,3e-2",
    preserve: Annotated[
        str | None, typer.Option(help="A preserver, as mas or lwf: choose its strength too, on the first --seen tasks.")
    ] = None,
    preserve_strengths: Annotated[str, typer.Option(help="The grid of the preserver's strengths.")] = "0.01,0.1,1,10,100",
    seen: Annotated[
        int | None,
        typer.Option(
            min=2, help="How many of the first tasks choose the preserver's strength.", show_default="3, or all if there are fewer"
        ),
    ] = None,
    drop: Annotated[float, typer.Option(min=0, help="For λ_Ω: take the largest that is within so many points of the best.")] = 0.0,
    extend: Annotated[
        int, typer.Option(min=0, help="For λ_Ω: how many values may be added at each end of its grid while the best one stands there.")
    ] = 2,
    tolerance: Annotated[
        float, typer.Option(min=0, help="For λ: how many points on the first task it may lose against training without a sparsifier.")
    ] = 0.5,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs per task.")] = 10,
    batch: Annotated[int, typer.Option(min=1, help="Samples per step.")] = 200,
    optimizer: Annotated[str, typer.Option(help="Optimizer: sgd, adam, adamw.")] = "sgd",
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-2,
    schedule: Annotated[str, typer.Option(help="Learning rate over a task: constant, cosine, step.")] = "constant",
    layers: Annotated[str, typer.Option(help="Where the sparsifier acts: hidden, all.")] = "hidden",
    augment: Annotated[str, typer.Option(help="Augmentation: none, crop-flip, …, as in run.")] = "none",
    precision: Annotated[str, typer.Option(help="On a GPU: fp32, tf32, bf16.")] = "tf32",
    limit: Annotated[int | None, typer.Option(min=1, help="How many images of each task to use.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 up.")] = 2,
    out: Annotated[Path, typer.Option(help="Where results are recorded and looked up.", rich_help_panel=HOW)] = Path("results/tune"),
    plot: Annotated[Path | None, typer.Option(help="Draw what was compared and chosen into this PNG file.", rich_help_panel=HOW)] = None,
    write: Annotated[Path | None, typer.Option(help="Write the settings and chosen strengths as TOML.", rich_help_panel=HOW)] = None,
    data_dir: DataDir = None,
    device: Device = None,
    workers: Workers = None,
    engine: Engine = None,
    address: Address = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Choose λ by the paper's rule of thumb, and with --preserve λ_Ω too: train several strengths, compare held-out accuracies.

    λ: the largest that keeps the accuracy on the first task. λ_Ω, at that λ: the one with the best accuracy over all --seen tasks, or the
    largest within --drop points of it. No test data are used.

    The paper asks for the smallest λ that keeps the accuracy, and for the λ that leaves most room, which is the largest one. Both are
    shown; the largest is suggested.
    """
    with reporting_errors(as_json):
        from selfless.experiments.base import Choice
        from selfless.experiments.choosing import choose, trials
        from selfless.experiments.decay import check_tunable
        from selfless.experiments.rule import tuning
        from selfless.runner import TrainOptions
        from selfless.spec import Run

        base = Run(
            stream=stream,
            model=model,
            sparsify=sparsify,
            epochs=epochs,
            batch=batch,
            optimizer=optimizer,  # type: ignore[arg-type]
            lr=lr,
            schedule=schedule,  # type: ignore[arg-type]
            layers=layers,  # type: ignore[arg-type]
            augment=augment,  # type: ignore[arg-type]
            precision=precision,  # type: ignore[arg-type]
            stream_options={} if limit is None else {"limit": limit},
        )
        grid, anchors = _parse_strengths(strengths), _parse_strengths(preserve_strengths, "--preserve-strengths")
        if plot is not None and plot.suffix.lower() != ".png":
            raise ValueError(f"--plot draws a PNG, but {plot.name!r} is not named so; try --plot {plot.stem}.png")
        if base.sparsify.name == "none":
            raise ValueError(
                "tune chooses the strength of a sparsifier first, so --sparsify none leaves nothing to choose; name one, such as slnid. "
                "selfless.tune(..., sparsify=None) in Python chooses that of a preserver alone"
            )
        _tell_unused(base.sparsify, grid, "--strengths")
        if preserve is not None:
            keep = base.replace(preserve=preserve).preserve
            check_tunable(keep, anchors)
            _tell_unused(keep, anchors, "--preserve-strengths")
        cell = tuning(base, grid, Choice("rule-largest", tuple(range(seeds)), tolerance=tolerance))
        runs = list(dict.fromkeys(trials(cell)))
        options = TrainOptions(
            out=out,
            data_dir=data_dir,
            device=device or "auto",
            workers=workers,
            force=force,
            engine=engine or "local",
            address=address,
        )
        results = dict(zip(runs, train_with_progress(runs, options, as_json=as_json), strict=True))
        largest = choose(cell, results)
        smallest = choose(tuning(base, grid, Choice("rule-smallest", tuple(range(seeds)), tolerance=tolerance)), results)
        sizes = [_held_out(result) for result in results.values()]
        sizes_seen = min(sizes, default=(0, 0))
        if preserve is None and plot is None and write is None:
            show_tuning(cell.candidates, largest.scores, largest.index, smallest.index, tolerance, as_json, sizes_seen)
            return
        from selfless.cli.tune_pair import Stage, finish

        seen = seen or (2 if preserve is None else _some_tasks(base, data_dir))
        stage = Stage(base, cell.candidates, largest, tolerance, drop, extend, seen, tuple(range(seeds)))
        nothing = nothing_to_suggest(largest.scores, sizes_seen)
        if not as_json:
            show_tuning(cell.candidates, largest.scores, largest.index, smallest.index, tolerance, as_json, sizes_seen, advise=not nothing)
        if nothing:
            raise ValueError(f"{nothing} Nothing was written.")
        finish(stage, preserve, anchors, options, plot, write, as_json, sizes_seen)


def _some_tasks(base: Run, data_dir: Path | None) -> int:
    """Return 3, or the number of tasks of the stream if it has fewer."""
    from selfless.data import stream

    return min(3, len(stream(base.stream, data_dir=data_dir, **base.stream_options).tasks))


def _tell_unused(term: Term, grid: Sequence[float], flag: str) -> None:
    """Say that a strength which was written with a method, as in slnid:0.5, is not tried. That of a sum is its ratio."""
    default = type(term).__dataclass_fields__["strength"].default
    if len(term.parts) == 1 and term.strength not in (*grid, default):
        typer.echo(f"note: tune tries the strengths of {flag}, and {term} is not among them", err=True)


def _parse_strengths(text: str, flag: str = "--strengths") -> tuple[float, ...]:
    try:
        found = tuple(sorted({float(word) for word in text.split(",")}))
    except ValueError:
        raise ValueError(f"{flag} is {text!r}; write numbers separated by commas, as 1e-4,1e-3,1e-2") from None
    if not found or not all(0 < strength < math.inf for strength in found):
        raise ValueError(f"{flag} is {text!r}; every strength must be a finite number above 0 (0 is tried anyway)")
    return found


def _held_out(result: Result) -> tuple[int, int]:
    """Return the number of held-out images of the first task, and of its classes; 0 if the record does not say it."""
    sizes = result.about.get("samples", {}).get("held_out") or [0]
    return sizes[0], len(result.data.tasks[0].classes) if result.data is not None else 0


def show_tuning(
    candidates: Sequence[Run],
    scores: Sequence[Sequence[float]],
    largest: int | None,
    smallest: int | None,
    tolerance: float,
    as_json: bool,
    held_out: tuple[int, int] = (0, 0),
    advise: bool = True,
) -> None:
    """Print the held-out accuracy of every candidate (the first has no sparsifier) and the strength to take.

    scores[i] are the accuracies of candidate i over seeds, in percent, NaN for a failed run. `largest` and `smallest` are the numbers
    of the candidates that the two readings of the rule choose; None: all failed. `held_out`: how many images and classes were scored.
    `advise`: say what to take.
    """
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
    from rich.table import Table

    table = Table(title="Held-out accuracy on the first task (%)", title_justify="left")
    table.add_column("sparsifier")
    for heading in ("accuracy", "± std", "to none"):
        table.add_column(heading, justify="right")
    table.add_column("")
    marks = {smallest: "← smallest", largest: "← largest that keeps it"} if any(kept[1:]) else {}
    for i, (run, (mean, std), ok) in enumerate(zip(candidates, means, kept, strict=True)):
        cells = ["failed", "–", ""]
        if mean == mean:
            cells = [f"{mean:.2f}", f"{std:.2f}" if std == std else "–", f"{mean - reference:+.2f}" if i else ""]
        table.add_row(str(run.sparsify), *cells, marks.get(i, ""), style=None if ok else "dim")
    console = open_console()
    console.print(table)
    if any(kept[1:]):
        suggested = f"Suggested: --sparsify {candidates[largest].sparsify}{caution(len(scores[0]))}"
        advice = nothing_to_suggest(scores, held_out) or suggested
    else:
        advice = f"No strength keeps the accuracy within {tolerance:g} points; the weakest is {candidates[smallest].sparsify}"
    if advise:
        console.print(advice, highlight=False)


def caution(seeds: int) -> str:
    """Return what to add to a suggestion that few seeds made."""
    return " (by one seed; --seeds 3 shows how much of this is chance)" if seeds == 1 else ""


def nothing_to_suggest(scores: Sequence[Sequence[float]], held_out: tuple[int, int]) -> str:
    """Return why these scores in percent choose nothing: all strengths have the same, and it is that of guessing. "" if they do choose."""
    means = {sum(row) / len(row) for row in scores}
    return explain_tie(means.pop() / 100, len(scores[0]), *held_out) if len(means) == 1 else ""


def explain_tie(accuracy: float, seeds: int, images: int, classes: int) -> str:
    """Return why every strength has the same accuracy, and what to do; nothing if all of them learn the task.

    The accuracy is compared with guessing among the classes, by the binomial distribution over `images` of each of `seeds` seeds.
    """
    from selfless.metrics import chance_of_hits

    if not images or not classes:
        return "Nothing to suggest: every strength gives the same accuracy. Train longer, or on more data."
    n, guess = images * seeds, 1 / classes
    if chance_of_hits(n, n, guess) > SURE:
        return f"Nothing to suggest: {images} held-out images are too few to tell strengths apart. Use more images, or more --seeds."
    if chance_of_hits(round(accuracy * n), n, guess) > SURE:
        return (
            f"Nothing to suggest: {100 * accuracy:.1f} % on {images} held-out images is what guessing among {classes} classes gives. "
            "Train longer (--epochs), or with another --lr."
        )
    return ""
