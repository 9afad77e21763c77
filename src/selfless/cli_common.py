"""What the commands share: how errors are told, the options of every command that trains, and training with live progress."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from selfless.spec import Result, Run


@contextmanager
def noted() -> Iterator[None]:
    """Warnings as a line on standard error, each once: who calls the library wants to see where one comes from, who types a command does
    not."""
    said = set[str]()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in said:
            print("note:", *str(message).split(), file=sys.stderr)
        said.add(str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextmanager
def piped() -> Iterator[None]:
    """Whoever reads our output, `head` for one, may have seen enough: then we are done, as if by SIGPIPE."""
    try:
        yield
    except BrokenPipeError:
        watch = select.poll()
        watch.register(sys.stdout.fileno(), 0)
        if not watch.poll(0):  # somebody reads it still: it was another pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the last flush would complain
        raise typer.Exit(141) from None


@contextmanager
def told(as_json: bool = False, stopped: str = "stopped; the same command goes on from the last saved epoch") -> Iterator[None]:
    """What a user can mend is one message and exit code 1; Ctrl-C and SIGTERM stop cleanly; only a bug gives a traceback."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with piped(), noted():
            yield
    except typer.Exit:  # which is a RuntimeError
        raise
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        if type(error) is RuntimeError and "CUDA" in str(error):
            raise
        if as_json:
            typer.echo(json.dumps({"error": str(error)}))
        else:
            typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.secho(stopped, err=True)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


HOW = "How it runs"
Out = Annotated[Path | None, typer.Option(help="Where results are recorded and looked up.", show_default="results", rich_help_panel=HOW)]
DataDir = Annotated[
    Path | None, typer.Option(help="Where data lies.", show_default="$SELFLESS_DATA, else the user's cache", rich_help_panel=HOW)
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1.", show_default="auto", rich_help_panel=HOW)]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes on a CPU.", show_default="one a core", rich_help_panel=HOW)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=HOW)]
Force = Annotated[bool, typer.Option("--force", help="Train again what is recorded already.", rich_help_panel=HOW)]


def trained(runs: Sequence[Run], *, force: bool, as_json: bool, out: Any = "results", **session: Any) -> list[Result]:
    """Train with live progress, or take what is recorded."""
    from rich.console import Console

    from selfless.cli_progress import watching
    from selfless.config import size
    from selfless.runner import Store, train

    console = Console(stderr=True, quiet=as_json)
    store = Store(out, session.get("data_dir"))
    recorded = set() if force else {run for run in runs if store.load(run) is not None}
    if recorded:
        console.print(
            f"{len(recorded)} of {len(runs)} run{'s' * (len(runs) > 1)} recorded in {out} already; --force trains again", soft_wrap=True
        )
    session["budget"] = size(session.get("budget"))
    session.setdefault("device", "auto")
    quiet = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()  # a user's factory may print
    with watching(runs, console) as watch, quiet:
        busy = "another process is training {}; waiting for it"
        results = train(runs, out=out, force=force, watch=watch, waiting=lambda r: console.print(busy.format(r.method)), **session)
    for line in utilisation([r for r in results if r.run not in recorded]):
        console.print(f"[dim]{line}[/dim]", highlight=False, soft_wrap=True)
    return results


def utilisation(results: Sequence[Result]) -> list[str]:
    """A line for every fleet among these: how many runs, where, how fast, and how much of a GPU's memory it took."""
    fleets: dict[tuple[Any, ...], dict[str, Any]] = {}
    for about in (r.about for r in results if r.about.get("run_steps_per_second")):
        fleets.setdefault((about["seconds"], about["run_steps_per_second"]), about)
    lines = []
    for about in fleets.values():
        size, memory = about["fleet"], about.get("memory")
        line = f"{size} run{'s as one fleet' if size > 1 else ''} on {about['hardware']}: {about['seconds']:.1f} s, "
        line += f"{about['run_steps_per_second']:,.0f} run-steps a second"
        lines.append(line + (f", {memory['peak_gb']:.1f} GB ({memory['share']:.0%} of its memory)" if memory else ""))
    return lines
