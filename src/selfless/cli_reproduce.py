"""`selfless reproduce`: the paper's tables and figures beside the published values. Heavy imports happen inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfless.cli_common import HOW, AsJson, DataDir, Device, Force, Workers, told, trained

if TYPE_CHECKING:
    from rich.console import Console

    from selfless.experiments import Experiment
    from selfless.experiments.reproduce import Train
    from selfless.spec import Result, Run

EXAMPLES = """[bold]Examples[/bold]

  selfless reproduce --list                        [dim]# every experiment, and how many runs it takes[/dim]
  selfless reproduce fig-2 --quick                 [dim]# all of its code, in seconds, on little data[/dim]
  selfless reproduce table-1 --profile paper       [dim]# the authors' settings[/dim]
  selfless reproduce rivals                        [dim]# what the paper does not have is named by itself: rivals, rivals-published[/dim]
  selfless reproduce all --seeds 5 --out results/reproduction && selfless report results/reproduction
  selfless reproduce all --judge --out results/reproduction [dim]# after a claim was added or reworded: nothing is trained[/dim]"""
OUT = Path("results")


def reproduce(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME…", help="Experiments, or all: those of the paper.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="Show every experiment with its number of runs, and stop.")] = False,
    profile: Annotated[str, typer.Option(help="ours, or paper: the authors' settings and selection, marked.")] = "ours",
    quick: Annotated[bool, typer.Option("--quick", help="A small version that runs all of the code; its numbers mean nothing.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds that are reported, from 0 up.", show_default="5; quick: 2")] = None,
    judge: Annotated[bool, typer.Option("--judge", help="Train nothing: judge today's claims by what is recorded.")] = False,
    out: Annotated[Path, typer.Option(help="Where results are recorded and looked up.", rich_help_panel=HOW)] = OUT,
    data_dir: DataDir = None,
    device: Device = None,
    workers: Workers = None,
    force: Force = False,
    checkpoints: Annotated[
        bool, typer.Option(help="Keep the trained networks too, which some figures are drawn from.", rich_help_panel=HOW)
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Regenerate tables and figures of the paper beside its published values, and say for each claim whether it holds.

    Strengths are chosen first (on held-out data, by a fleet), then every cell is trained with every seed. What is recorded is not
    trained again. A failed claim is a result; a failed run makes the exit status 1. Table 2 takes the object sets and AlexNet weights that
    are in the data folder (selfless data list); without all of them it fills a column of its own and leaves the published one open.
    """
    with told(as_json):
        from rich.console import Console

        from selfless.data import holding
        from selfless.experiments import NAMES, PAPER, experiment

        count = seeds or (2 if quick else 5)
        if listing:
            _listing(count, data_dir, as_json)
            return
        if not names:
            raise ValueError(f"say which experiment: {', '.join(NAMES)}, or all")
        if judge:
            records = _judged(_named(names, PAPER), profile, quick, out)
            if as_json:
                typer.echo(json.dumps({"out": str(out), "experiments": records, "problems": {}}))
            else:
                _show(records, out)
            return
        wanted = [experiment(name, profile, quick=quick, data_dir=data_dir, prepare=True) for name in _named(names, PAPER)]
        if not any(cell.candidates for one in wanted for cell in one.cells):
            raise ValueError("nothing can be run: " + "; ".join(f"{one.name}: {one.pending}" for one in wanted))
        if not checkpoints:
            _refuse_without_checkpoints(wanted)
        session = {
            "data_dir": data_dir,
            "device": device or "auto",
            "workers": workers or (1 if quick else None),
            "checkpoints": checkpoints,
        }
        say = Console(stderr=True, quiet=as_json)
        with holding():
            records, problems = _run(wanted, count, out, session, force, as_json, say)
        if as_json:
            typer.echo(json.dumps({"out": str(out), "experiments": records, "problems": problems}))
        else:
            _show(records, out)
        for name, problem in problems.items():
            typer.secho(f"{name}: {problem}", fg=typer.colors.RED, err=True)
        if problems:
            raise typer.Exit(1)


def _refuse_without_checkpoints(wanted: Sequence[Experiment]) -> None:
    from selfless.experiments.measures import MEASURES

    drawn = [one.name for one in wanted if any(MEASURES[cell.value].from_checkpoint for cell in one.cells)]
    if drawn:
        raise ValueError(f"{', '.join(drawn)}: drawn from the trained networks, which --no-checkpoints does not keep; leave it out")


def _named(names: Sequence[str], paper: Sequence[str]) -> list[str]:
    """`all` is every experiment of the paper; others may be named beside it."""
    return list(dict.fromkeys(one for name in names for one in (paper if name == "all" else (name,))))


def _judged(names: Sequence[str], profile: str, quick: bool, out: Path) -> list[dict[str, Any]]:
    """Every record of these that is there, judged again and written back."""
    from selfless.experiments import experiment
    from selfless.experiments.reproduce import judged_again, record_file
    from selfless.files import write_json
    from selfless.report.experiments import read

    records = []
    for name in names:
        path = record_file(out, experiment(name, profile, quick=quick, record={"cells": []}))
        if path.is_file():
            record = {key: value for key, value in read(path).items() if key != "folder"}
            records.append(judged_again(record, experiment(name, profile, quick=quick, record=record)))
            write_json(path, records[-1])
    if not records:
        raise ValueError(
            f"{out} has no record of {', '.join(names)} in profile {profile}; make one: selfless reproduce {names[0]} --out {out}"
        )
    return records


def _run(
    wanted: Sequence[Experiment], seeds: int, out: Path, session: dict[str, Any], force: bool, as_json: bool, say: Console
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(the records, what went wrong by experiment): data or checkpoints that are missing stop one experiment, not the others."""
    from rich.console import Console

    from selfless.data import DataError
    from selfless.experiments.measures import MissingCheckpoint
    from selfless.experiments.reproduce import pooled
    from selfless.experiments.reproduce import reproduce as run_one

    records, problems = [], {}
    train = _trainer(session, force, as_json, say)
    if len(wanted) > 1:
        pooled(wanted, seeds=seeds, out=out, train=train)
        train = _trainer(session, False, True, Console(quiet=True))  # what is left is to read what was recorded
    for one in wanted:
        try:
            record = run_one(one, seeds=seeds, out=out, train=train, data_dir=session["data_dir"])
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


def _trainer(session: dict[str, Any], force: bool, as_json: bool, say: Console) -> Train:
    """The runner with live progress; `--force` trains each run again once, however many experiments share it. Of the runs that only
    choose strengths, the numbers are kept and no checkpoints."""
    from selfless.experiments.reproduce import CHOOSING

    fresh: set[tuple[Path, Run]] = set()

    def train(runs: Sequence[Run], place: Path, what: str) -> list[Result]:
        say.print(f"[bold]{what}[/bold], {len(runs)} run{'s' * (len(runs) > 1)}")
        again = [run for run in runs if force and (place, run) not in fresh]
        how = {**session, "as_json": as_json, "out": place, "checkpoints": session["checkpoints"] and place.name != CHOOSING}
        if again:
            trained(again, force=True, **how)
            fresh.update((place, run) for run in again)
        return trained(runs, force=False, **how)

    return train


def _show(records: Sequence[dict[str, Any]], out: Path) -> None:
    from rich.console import Console

    from selfless.report import experiments as reporting

    console = Console()
    for record in records:
        console.print(reporting.terminal(record))
    found = reporting.tally(records)
    if len(records) > 1 and any(found.values()):
        console.print(", ".join(f"{number} {verdict}" for verdict, number in found.items() if number) + f" of {sum(found.values())} claims")
    console.print(f"records: {out / 'experiments'}    page: selfless report {out}", highlight=False, soft_wrap=True)


def _listing(seeds: int, data_dir: Path | None, as_json: bool) -> None:
    from selfless.experiments import NAMES, PAPER, experiment
    from selfless.experiments.base import PROFILES
    from selfless.experiments.reproduce import count

    made = {profile: [experiment(name, profile, data_dir=data_dir) for name in NAMES] for profile in PROFILES}
    rows: list[dict[str, Any]] = [
        {
            "name": one.name,
            "source": one.source,
            "title": one.title,
            "claims": len(one.claims),
            "runs": {profile: count([made[profile][i]], seeds) for profile in PROFILES},
            "pending": one.pending,
        }
        for i, one in enumerate(made["ours"])
    ]
    total = {profile: count([one for one in made[profile] if one.name in PAPER], seeds) for profile in PROFILES}
    if as_json:
        typer.echo(json.dumps({"seeds": seeds, "experiments": rows, "total": total}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Experiments; runs with {seeds} seeds, choosing included", title_justify="left")
    for heading, justify in (("name", "left"), ("in the paper", "left"), ("what", "left"), ("claims", "right")):
        table.add_column(heading, justify=justify, no_wrap=heading == "name")  # type: ignore[arg-type]
    for profile in ("ours", "paper"):
        table.add_column(profile, justify="right")
    for row in rows:
        runs = row["runs"]
        table.add_row(
            row["name"], row["source"], row["title"], str(row["claims"]), *(str(runs[p]) if runs[p] else "–" for p in ("ours", "paper"))
        )
    table.add_section()
    table.add_row("all", "of the paper", "what is shared is trained once", "", str(total["ours"]), str(total["paper"]))
    console = Console()
    console.print(table)
    for row in rows:
        if row["pending"]:
            console.print(f"– {row['name']}: {row['pending']}")
