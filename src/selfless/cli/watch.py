"""`selfless watch`: follow the runs of a folder that another process trains."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfless.cli.errors import reporting_errors
from selfless.cli.options import AsJson
from selfless.cli.terminal import open_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from selfless.engine.progress import Event
    from selfless.runner.study import RunState, Snapshot, StudyReader

EXAMPLES = """[bold]Examples[/bold]

  selfless watch results                   [dim]# redrawn every two seconds, until everything is done[/dim]
  selfless watch /shared/study --interval 60 >> study.log
  selfless watch results --once --json     [dim]# one look, for a script[/dim]"""
COLOURS = {"running": "cyan", "failed": "red", "stopped": "yellow", "done": "green", "waiting": "dim"}
MOST_SEEDS = 4  # so many seeds are named one by one


def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of results, here or on another machine.")] = Path("results"),
    once: Annotated[bool, typer.Option("--once", help="Look once, and do not wait.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Seconds between two looks.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Follow a study that another process trains: which runs are done, running, waiting, failed and why; speed and time left.

    It reads files only, and ends by itself when nothing runs any more. The exit status is 1 if a run failed or was stopped.
    """
    with reporting_errors(as_json, "stopped watching; the training goes on"):
        from selfless.runner.study import StudyReader, as_dict

        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; name the --out of a running command, as in selfless watch results")
        reader, console = StudyReader(folder), open_console()
        snapshot = reader.look()
        if not snapshot.runs:
            raise ValueError(f"{folder} holds no runs, and nothing is training there; begin with selfless run --out {folder}")
        if not once:
            snapshot = _follow(reader, snapshot, interval, open_console(stderr=True) if as_json else console)
        if as_json:
            typer.echo(json.dumps(as_dict(snapshot)))
        else:
            for line in lines(snapshot, console.width if console.is_terminal else 10**6):
                console.print(line, soft_wrap=True)
        if snapshot.count("failed") or (snapshot.is_over and snapshot.count("stopped")):
            raise typer.Exit(1)


def _follow(reader: StudyReader, snapshot: Snapshot, interval: float, console: Console) -> Snapshot:
    """Show the folder until nothing runs any more; return the last look. Without a terminal: one line where something has changed."""
    from rich.live import Live

    from selfless.cli.progress import ASIDE, can_redraw, fit

    if can_redraw(console):
        with Live(console=console, transient=True, auto_refresh=False) as live:
            while not snapshot.is_over:
                live.update(fit(lines(snapshot, max(10, console.width - ASIDE)), console), refresh=True)
                time.sleep(interval)
                snapshot = reader.look()
        return snapshot
    last = ""
    while not snapshot.is_over:
        line = ", ".join([time.strftime("%H:%M:%S"), *overall(snapshot), *_where(snapshot)])
        if line[8:] != last[8:]:
            console.print(line, soft_wrap=True, highlight=False, markup=False)
        last = line
        time.sleep(interval)
        snapshot = reader.look()
    return snapshot


def _where(snapshot: Snapshot) -> list[str]:
    """Return where the fleets are, if one line can say it."""
    from selfless.cli.lines import describe

    events = [states[0].event for states in _fleets(snapshot)]
    return describe(_event(events[0]))[:2] if len(events) == 1 else []


def overall(snapshot: Snapshot) -> list[str]:
    """Return all runs in short phrases: "24 runs: 12 done", "8 running", "1.2k steps/s", "time left 2:10"."""
    from selfless.cli.lines import clock, short
    from selfless.runner.study import STATES

    counts = [f"{n} {state}" for state in reversed(STATES) if (n := snapshot.count(state))]
    total = len(snapshot.runs)
    phrases = [f"{total} run{'s' * (total != 1)}: {counts[0]}", *counts[1:]]
    if snapshot.speed:
        phrases.append(f"{short(snapshot.speed)} steps/s")
    if snapshot.per_hour is not None:
        phrases.append(f"{short(snapshot.per_hour)} runs an hour")
    if snapshot.seconds_left is not None:
        phrases.append(f"time left {clock(snapshot.seconds_left)}")
    return phrases


def lines(snapshot: Snapshot, width: int) -> list[Text]:
    """Return a line or more for every fleet that runs and for every method and state, under headings of stream and network."""
    from rich.text import Text

    from selfless.cli.lines import describe, name_fleet, wrap

    found = [Text(line, "bold") for line in wrap(overall(snapshot), width)]
    places = list(dict.fromkeys((run.stream, run.model) for run in snapshot.runs))
    for place in places:
        here = [run for run in snapshot.runs if (run.stream, run.model) == place]
        found += [Text(line, "underline") for line in wrap([", ".join(filter(None, place))], width)] if any(place) else []
        for states in _fleets(snapshot, here):
            name = name_fleet([run.method for run in states]) if len(states) > 1 else f"{states[0].method}, seed {states[0].seed}"
            found += _coloured([name, "running", *describe(_event(states[0].event))], "running", width)
        rest: dict[tuple[str, str, str], list[RunState]] = {}
        for run in here:
            if run.state != "running":
                rest.setdefault((run.method, run.state, run.reason), []).append(run)
        for (method, state, reason), runs in rest.items():
            known, seeds = [run.accuracy for run in runs if run.accuracy is not None], [run.seed for run in runs]
            alike = len(set(seeds)) == len(seeds)  # one seed twice: the runs differ in another setting, such as epochs
            average = [f"average {100 * sum(known) / len(known):.1f} %"] if known and alike else []
            which = _seeds(seeds) if alike else f"{len(runs)} runs of different settings"
            name = f"{method}, {which}" if any(place) else method
            found += _coloured([name, f"{state}: {reason}" if reason else state, *average], state, width, whole=bool(reason))
    return found


def _coloured(parts: Sequence[str], state: str, width: int, whole: bool = False) -> list[Text]:
    """Return the phrases as lines, with the state in its colour. `whole`: a reason is folded, not cut."""
    from textwrap import wrap as fold

    from rich.text import Text

    from selfless.cli.lines import wrap

    made = wrap(parts, width)
    if whole and any(line.endswith("…") for line in made):
        made = fold("  ".join(parts), width, subsequent_indent="  ")
    texts = [Text(line) for line in made]
    for text in texts:
        text.highlight_words([parts[1]], style=COLOURS[state])
    return texts


def _fleets(snapshot: Snapshot, among: Sequence[RunState] | None = None) -> list[list[RunState]]:
    """Return the runs that train now, by fleet."""
    found: dict[int, list[RunState]] = {}
    for run in snapshot.runs if among is None else among:
        if run.state == "running":
            found.setdefault(run.fleet, []).append(run)
    return list(found.values())


def _event(values: dict[str, Any]) -> Event:
    """Return an event of a note. A loss that was not finite is left out."""
    from selfless.engine.progress import Event

    known: dict[str, Any] = {k: [x for x in v if x is not None] if isinstance(v, list) else v for k, v in values.items()}
    return Event(**known)


def _seeds(seeds: Sequence[int]) -> str:
    """Return "seed 3", "seeds 0, 1" or "seeds 0–9"."""
    ordered = sorted(seeds)
    if len(ordered) == 1:
        return f"seed {ordered[0]}"
    unbroken = ordered == list(range(ordered[0], ordered[-1] + 1))
    if unbroken and len(ordered) > 2:
        return f"seeds {ordered[0]}–{ordered[-1]}"
    return f"seeds {', '.join(map(str, ordered))}" if len(ordered) <= MOST_SEEDS else f"{len(ordered)} seeds"
