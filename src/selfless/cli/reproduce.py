"""`selfless reproduce`: make the paper's tables and figures beside the published values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfless.cli.errors import print_error, reporting_errors
from selfless.cli.options import HOW, Address, AsJson, DataDir, Device, Engine, Force, Workers
from selfless.cli.parts import show_plan, train_part
from selfless.cli.terminal import open_console
from selfless.cli.training import train_with_progress

if TYPE_CHECKING:
    from rich.console import Console

    from selfless.experiments import Experiment
    from selfless.experiments.choosing import RecordedScore
    from selfless.experiments.reproduce import Train
    from selfless.runner import TrainOptions
    from selfless.spec import Result, Run

EXAMPLES = """[bold]Examples[/bold]

  selfless reproduce --list                        [dim]# every experiment, and how many runs it takes[/dim]
  selfless reproduce fig-2 --quick                 [dim]# all of its code, in seconds, on little data[/dim]
  selfless reproduce table-1 --profile paper       [dim]# the authors' settings[/dim]
  selfless reproduce rivals                        [dim]# not in the paper, so not in `all`: rivals-published, rivals-projection[/dim]
  selfless reproduce all --seeds 5 --out results/reproduction && selfless report results/reproduction
  selfless reproduce all --profile equal --seeds 10 --plan --most 500 [dim]# its parts, on one H200[/dim]
  selfless reproduce all --profile equal --seeds 10 --part 2/6 --out part-2
  selfless reproduce all --judge --out results/reproduction [dim]# after a claim was added or reworded: nothing is trained[/dim]"""


def reproduce(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME…", help="Experiments, or all: every one of the paper.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="Show every experiment with its number of runs, and stop.")] = False,
    profile: Annotated[
        str, typer.Option(help="ours; equal: equal grids for all rows; paper: the authors' settings, selection on test data (marked).")
    ] = "ours",
    quick: Annotated[bool, typer.Option("--quick", help="A small version that runs all of the code; its numbers mean nothing.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds to report, from 0 up.", show_default="5; quick: 2")] = None,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of the reported seeds; choosing has its own.")] = 0,
    part: Annotated[str | None, typer.Option(metavar="I/N", help="Train one of N parts, and write no record; see results merge.")] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show the parts, their estimated seconds on one H200, what --out lacks of them; stop.")
    ] = False,
    most: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="With --plan: about how long a part may take.")] = 1500,
    judge: Annotated[bool, typer.Option("--judge", help="Train nothing; decide the current claims by the recorded results.")] = False,
    out: Annotated[Path, typer.Option(help="Where results are recorded and looked up.", rich_help_panel=HOW)] = Path("results"),
    data_dir: DataDir = None,
    device: Device = None,
    workers: Workers = None,
    engine: Engine = None,
    address: Address = None,
    force: Force = False,
    checkpoints: Annotated[
        bool, typer.Option(help="Record the trained networks too; some figures are drawn from them.", rich_help_panel=HOW)
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Regenerate tables and figures of the paper beside its published values, and say for each claim whether it holds.

    Strengths are chosen first (on held-out data, by a fleet), then every cell is trained with every seed. Recorded runs are not trained
    again. A failed claim is a result; a failed run makes the exit status 1. Table 2 uses the object sets and AlexNet weights in the data
    folder (selfless data list). If some are missing, its values get a column of their own: they cannot be compared with the paper's.
    """
    with reporting_errors(as_json):
        from selfless.data import holding
        from selfless.experiments import NAMES, PAPER, experiment
        from selfless.experiments.recorded import recorded_scores
        from selfless.experiments.reproduce import check_together
        from selfless.runner import TrainOptions

        count = seeds or (2 if quick else 5)
        if listing:
            _list_experiments(count, data_dir, as_json)
            return
        if not names:
            raise ValueError(f"say which experiment: {', '.join(NAMES)}, or all")
        chosen = _expand(names, PAPER)
        if judge:
            _show(_judge_again(chosen, profile, quick, out), {}, out, as_json)
            return
        wanted = [experiment(name, profile, quick=quick, data_dir=data_dir, prepare=not plan) for name in chosen]
        if not any(cell.candidates for one in wanted for cell in one.cells):
            raise ValueError("nothing can be run: " + "; ".join(f"{one.name}: {one.pending}" for one in wanted))
        if plan:
            known = {} if force else recorded_scores(out)
            show_plan(wanted, range(first_seed, first_seed + count), part, most, as_json, out, known, data_dir)
            return
        if not checkpoints:
            _refuse_without_checkpoints(wanted)
        options = TrainOptions(
            out=out,
            data_dir=data_dir,
            device=device or "auto",
            workers=workers or (1 if quick and engine in (None, "local") else None),
            engine=engine or "local",
            address=address,
            checkpoints=checkpoints,
            force=force,
        )
        with holding():
            check_together(wanted, options)
            console = open_console(stderr=True, quiet=as_json)
            if part:
                known = _recorded(options, console)
                said = train_part(wanted, part, count, first_seed, out, _trainer(options, as_json, console), known, data_dir)
                typer.echo(json.dumps({"out": str(out), "part": part, "next": said}) if as_json else said)
                return
            records, problems = _run(wanted, count, first_seed, options, as_json, console)
        _show(records, problems, out, as_json)
        for name, problem in problems.items():
            print_error(f"{name}: {problem}")
        if problems:
            raise typer.Exit(1)


def _refuse_without_checkpoints(wanted: Sequence[Experiment]) -> None:
    """Refuse --no-checkpoints for figures that are drawn from checkpoints."""
    from selfless.experiments.measures import MEASURES

    drawn = [one.name for one in wanted if any(MEASURES[cell.value].from_checkpoint for cell in one.cells)]
    if drawn:
        raise ValueError(
            f"{', '.join(drawn)}: drawn from the trained networks, which --no-checkpoints does not record; leave that flag out"
        )


def _expand(names: Sequence[str], paper: Sequence[str]) -> list[str]:
    """Replace `all` by every experiment of the paper; others may be named beside it."""
    return list(dict.fromkeys(one for name in names for one in (paper if name == "all" else (name,))))


def _judge_again(names: Sequence[str], profile: str, quick: bool, out: Path) -> list[dict[str, Any]]:
    """Decide the current claims of every recorded experiment among these, and write the records back."""
    from selfless.experiments import experiment
    from selfless.experiments.reproduce import judge_again, record_file
    from selfless.files import write_json
    from selfless.report.experiments import read

    records = []
    for name in names:
        path = record_file(out, experiment(name, profile, quick=quick, record={"cells": []}))
        if path.is_file():
            record = {key: value for key, value in read(path).items() if key != "folder"}
            records.append(judge_again(record, experiment(name, profile, quick=quick, record=record)))
            write_json(path, records[-1])
    if not records:
        raise ValueError(
            f"{out} has no record of {', '.join(names)} in profile {profile}; make one: selfless reproduce {names[0]} --out {out}"
        )
    return records


def _run(
    wanted: Sequence[Experiment], seeds: int, first_seed: int, options: TrainOptions, as_json: bool, console: Console
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(the records, what went wrong by experiment). Missing data or checkpoints stop one experiment, not the others."""

    from selfless.data import DataError
    from selfless.experiments.measures import MissingCheckpoint
    from selfless.experiments.reproduce import reproduce as run_one
    from selfless.experiments.reproduce import train_together

    assert options.out is not None
    records, problems = [], {}
    train, known = _trainer(options, as_json, console), _recorded(options, console)
    if len(wanted) > 1:
        cells = [cell for one in wanted for cell in one.cells]
        train_together(cells, seeds=seeds, out=options.out, train=train, first_seed=first_seed, data_dir=options.data_dir, recorded=known)
        train = _trainer(dataclasses.replace(options, force=False), True, open_console(quiet=True))  # reads what was just recorded
    for one in wanted:
        try:
            record = run_one(
                one, seeds=seeds, out=options.out, train=train, data_dir=options.data_dir, first_seed=first_seed, recorded=known
            )
        except (DataError, MissingCheckpoint) as error:
            if len(wanted) == 1:
                raise
            problems[one.name] = f"not run: {error}"
            continue
        records.append(record)
        failed = [f"{c['row']}, {c['column']}" for c in record["cells"] if "failed" in c["status"]]
        if failed:
            problems[one.name] = f"runs failed in {len(failed)} cell{'s' * (len(failed) > 1)}: {'; '.join(failed)}"
    return records, problems


def _recorded(options: TrainOptions, console: Console) -> dict[str, RecordedScore]:
    """Return the scores that the records in the folder of results contain; none with `--force`."""
    from selfless.experiments.recorded import recorded_scores

    assert options.out is not None
    found = {} if options.force else recorded_scores(options.out)
    if found:
        console.print(f"the records in {options.out} have the scores of {len(found)} candidates; --force trains them again", soft_wrap=True)
    return found


def _trainer(options: TrainOptions, as_json: bool, console: Console) -> Train:
    """The function that experiments train with: train(runs, folder, what).

    `--force` trains each run again once, however many experiments share it. Runs that only choose strengths keep no checkpoints.
    """
    from rich.text import Text

    from selfless.experiments.reproduce import CHOOSING

    fresh: set[tuple[Path, Run]] = set()

    def train(runs: Sequence[Run], place: Path, what: str) -> list[Result]:
        console.print(Text.assemble((what, "bold"), f", {len(runs)} run{'s' * (len(runs) > 1)}"))
        here = dataclasses.replace(options, out=place, checkpoints=options.checkpoints and place.name != CHOOSING)
        again = [run for run in runs if options.force and (place, run) not in fresh]
        if again:
            train_with_progress(again, here, as_json=as_json)
            fresh.update((place, run) for run in again)
        return train_with_progress(runs, dataclasses.replace(here, force=False), as_json=as_json)

    return train


def _show(records: Sequence[dict[str, Any]], problems: dict[str, str], out: Path, as_json: bool) -> None:
    """Print the records as JSON, or as tables with the number of claims that hold."""
    if as_json:
        typer.echo(json.dumps({"out": str(out), "experiments": records, "problems": problems}))
        return

    from selfless.report import experiments as reporting
    from selfless.report.families import correct

    console, records = open_console(), correct(records)
    for record in records:
        console.print(reporting.terminal(record))
    found = reporting.tally(records)
    if len(records) > 1 and any(found.values()):
        console.print(", ".join(f"{number} {verdict}" for verdict, number in found.items() if number) + f" of {sum(found.values())} claims")
    console.print(f"records: {out / 'experiments'}    page: selfless report {out}", highlight=False, soft_wrap=True)


def _list_experiments(seeds: int, data_dir: Path | None, as_json: bool) -> None:
    """Print every experiment with its claims and the number of its runs in each profile."""
    from selfless.experiments import NAMES, PAPER, experiment
    from selfless.experiments.reproduce import count

    profiles = ("ours", "equal", "paper")
    made = {profile: [experiment(name, profile, data_dir=data_dir) for name in NAMES] for profile in profiles}
    rows: list[dict[str, Any]] = [
        {
            "name": one.name,
            "source": one.source,
            "title": one.title,
            "claims": len(one.claims),
            "runs": {profile: count([made[profile][i]], seeds) for profile in profiles},
            "pending": one.pending,
        }
        for i, one in enumerate(made["ours"])
    ]
    total = {profile: count([one for one in made[profile] if one.name in PAPER], seeds) for profile in profiles}
    if as_json:
        typer.echo(json.dumps({"seeds": seeds, "experiments": rows, "total": total}))
        return
    from rich.table import Table

    table = Table(title=f"Experiments; runs with {seeds} seeds, choosing included", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("what")
    for heading in ("claims", *profiles):
        table.add_column(heading, justify="right")
    for row in rows:
        what = f"{row['source']}: {row['title']}" if row["name"] in PAPER else row["title"]
        shown = [str(row["runs"][profile] or "–") for profile in profiles]
        table.add_row(row["name"], what, str(row["claims"]), *shown, end_section=row["name"] == PAPER[-1])
    table.add_section()
    table.add_row("all", "those of the paper; what is shared is trained once", "", *(str(total[profile]) for profile in profiles))
    console = open_console()
    console.print(table)
    console.print("–: not in this profile, or its data are missing. Each profile: selfless reproduce NAME --profile equal")
    for row in rows:
        if row["pending"] and not any(row["runs"].values()):
            console.print(f"{row['name']}: {row['pending']}")
