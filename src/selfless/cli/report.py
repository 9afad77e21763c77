"""`selfless report`: show recorded results as a page, as tables or as figures."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from selfless.cli.errors import reporting_errors
from selfless.cli.results import load_results

EXAMPLES = (
    "Examples:  selfless report results  ·  selfless report results --format latex  ·  selfless report results --figures figures"
    "  ·  selfless report mine --against results/reproduction  ·  selfless report results/equal --split 10"
)
Record = dict[str, Any]


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of results.")] = Path("results"),
    to: Annotated[Path | None, typer.Option("--to", help="The page to write.", show_default="DIR/report.html")] = None,
    form: Annotated[
        str, typer.Option("--format", help="html writes a page; md, csv, latex, claims, values print to standard output.")
    ] = "html",
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write only the figures of experiments (PNG, PDF) into DIR, and no page.")
    ] = None,
    other: Annotated[
        Path | None,
        typer.Option(
            "--against", metavar="DIR", help="Print only a comparison with the experiments in DIR, by the seeds of both, as Markdown."
        ),
    ] = None,
    split: Annotated[
        int | None,
        typer.Option("--split", metavar="N", min=2, help="Print only a comparison of each experiment's first N seeds with the next N."),
    ] = None,
) -> None:
    """Make one self-contained HTML page of everything recorded in DIR, or its tables. Experiments come first."""
    with reporting_errors():
        from selfless import report as reporting
        from selfless.report import experiments as experimental
        from selfless.report.families import correct
        from selfless.runner.store import Store

        if other is not None:
            typer.echo(_comparison(folder, other))
            return
        if split is not None:
            typer.echo(_halves(folder, split))
            return
        found = sorted(correct(experimental.load(folder)), key=_place)
        records = [experimental.marked(record, *declared_today(record)) for record in found]
        results = Store(folder).all(skip=True) if records else load_results(folder)
        if figures is not None:
            _write_figures(records, folder, figures)
        elif form in ("claims", "values"):
            typer.echo(_claims(found, folder, form), nl=False)
        elif form == "html":
            typer.echo(reporting.write(results, to or folder / "report.html", out=folder, experiments=records))
        elif form not in ("md", "csv", "latex"):
            raise ValueError(f"format {form!r} is unknown; choose html, md, csv, latex, claims or values")
        else:
            name = {"md": "markdown"}.get(form, form)
            parts = [getattr(experimental, name)(records)] if records else []
            rest = [r for r in results if r.run.key not in experimental.keys(records)]
            if not records or (rest and form != "csv"):  # a CSV holds one table: that of the experiments, where there are any
                parts.append(getattr(reporting, name)(rest))
            typer.echo("\n".join(parts))


def _claims(records: Sequence[Record], folder: Path, form: str) -> str:
    """The claims of all experiments in one Markdown table, or the values of each experiment in a small one."""
    from selfless.report.claims import claims_table, values_tables

    if not records:
        raise ValueError(f"{folder} holds no record of an experiment. Make one: selfless reproduce fig-2 --out {folder}")
    return values_tables(records) if form == "values" else claims_table(records)


def _comparison(folder: Path, other: Path) -> str:
    """The experiments of two folders side by side, as Markdown."""
    from selfless.report import against

    mine, theirs = (sorted(against.records(one), key=_place) for one in (folder, other))
    names = (folder.resolve().name, other.resolve().name)
    which = itemgetter("name", "profile", "quick")
    seeds = [{which(record): record["seeds"] for record in some} for some in (mine, theirs)]
    mine, theirs = (
        [_of_shared_seeds(record, others.get(which(record), [])) for record in some]
        for some, others in ((mine, seeds[1]), (theirs, seeds[0]))
    )
    return against.against(mine, theirs, names if names[0] != names[1] else (str(folder), str(other)))


def _of_shared_seeds(record: Record, seeds: Sequence[int]) -> Record:
    """The record by the seeds of the other folder alone, if it has these and more: by more seeds more claims are decided."""
    from selfless.experiments import EXPERIMENTS, experiment
    from selfless.experiments.reproduce import of_seeds

    if not seeds or not set(seeds) < set(record["seeds"]) or record["name"] not in EXPERIMENTS:
        return record
    made = experiment(record["name"], record["profile"], quick=record["quick"], record=record)
    return of_seeds(record, made, range(min(seeds), max(seeds) + 1))


def _halves(folder: Path, size: int) -> str:
    """The verdicts and values by the first seeds of every experiment beside those by as many others, as Markdown."""
    from selfless.experiments import EXPERIMENTS, experiment
    from selfless.experiments.reproduce import of_seeds
    from selfless.report import against

    halves: tuple[list[Record], list[Record]] = [], []
    for record in sorted(against.records(folder), key=_place):
        if record["name"] in EXPERIMENTS and len(record["seeds"]) >= 2 * size:
            made = experiment(record["name"], record["profile"], quick=record["quick"], record=record)
            first = record["seeds"][0]
            for half, start in zip(halves, (first, first + size), strict=True):
                half.append(of_seeds(record, made, range(start, start + size)))
    if not halves[0]:
        raise ValueError(f"no experiment in {folder} has {2 * size} seeds; choose a smaller number than {size}, or add seeds")
    return against.against(*halves, (f"The first {size} seeds", f"the next {size}"))


def _write_figures(records: Sequence[Record], folder: Path, figures: Path) -> None:
    from selfless.report.experiment_plots import save

    written = save(records, figures)
    if not written:
        raise ValueError(f"{folder} holds no experiment to draw; make one: selfless reproduce fig-2 --out {folder}")
    typer.echo(f"{len(written)} files in {figures}")


def _place(record: Record) -> tuple[bool, str, int]:
    """The order of records: ours before the paper's settings, each in the order of the paper; quick versions last."""
    from selfless.experiments import NAMES

    return record["quick"], record["profile"], NAMES.index(record["name"]) if record["name"] in NAMES else len(NAMES)


def declared_today(record: Record) -> tuple[set[str], dict[tuple[str, str], set[str]]]:
    """(keys of the runs of the first seed that the record's experiment may report as it is written today, those of each cell's candidates).

    Both are empty for an experiment that does not exist any more.
    """
    from selfless.experiments import EXPERIMENTS, experiment
    from selfless.experiments.reproduce import declared, grids

    if record["name"] not in EXPERIMENTS:
        return set(), {}
    made = experiment(record["name"], record["profile"], quick=record["quick"], record=record)
    return declared(made, record["seeds"][:1]), grids(made)
