"""Options of the commands: those that several share, and those of `run` and `compare`, most of which are the fields of `Run`."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from selfless.fields import Option
from selfless.spec import Run

HOW = "How it runs"
Out = Annotated[Path | None, typer.Option(help="Folder in which results are recorded.", show_default="results", rich_help_panel=HOW)]


def _tell_missing(folder: Path | None) -> Path | None:
    """Say that a named folder is not there. Data in the cache are read without it, so that a wrong name would never be noticed."""
    if folder is not None and not os.path.isdir(os.path.expanduser(folder)):
        typer.echo(f"note: there is no folder {folder}; data are read from the cache, and what is fetched goes into that folder", err=True)
    return folder


DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder with the data sets.",
        show_default="$SELFLESS_DATA, else the user's cache",
        rich_help_panel=HOW,
        callback=_tell_missing,
    ),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1.", show_default="auto", rich_help_panel=HOW)]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes on a CPU.", show_default="one per core", rich_help_panel=HOW)]
Engine = Annotated[
    str | None, typer.Option(help="Where fleets train: local, ray (a cluster; docs/scale.md).", show_default="local", rich_help_panel=HOW)
]
Address = Annotated[
    str | None,
    typer.Option(
        help="The Ray cluster: auto on one of its machines, HOST:PORT.",
        show_default="$RAY_ADDRESS, else this machine",
        rich_help_panel=HOW,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=HOW)]
Force = Annotated[bool, typer.Option("--force", help="Train runs again that are already recorded.", rich_help_panel=HOW)]


def _shared(
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
) -> None:
    """The options of `run` and `compare` beside the fields of `Run`."""


def with_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Put an option for every field of `Run` and those of `_shared` behind the command's own; one with a default replaces a shared one.

    What the command does not name comes in its `**flags`; None: not given. The real default is only shown, because a TOML file may set
    a field whose flag is not given.
    """
    signature, shared = inspect.signature(command, eval_str=True), dict(inspect.signature(_shared, eval_str=True).parameters)
    named = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    first = [p for p in named if p.name not in shared]
    last = shared | {p.name: p for p in named if p.name in shared and p.default is not inspect.Parameter.empty}
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*first, *_run_parameters(), *last.values())]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads both
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def with_limit(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of `plan`: --limit is an option of the stream."""
    limit = [] if flags["limit"] is None else [f"limit={flags['limit']}"]
    options = [*(flags["stream_options"] or []), *limit]
    return {name: value for name, value in flags.items() if name != "limit"} | {"stream_options": options or None}


def _run_parameters() -> Iterator[inspect.Parameter]:
    for field in dataclasses.fields(Run):
        option: Option = field.metadata["option"]
        flag = option.flag or f"--{field.name.replace('_', '-')}"
        described = typer.Option(
            flag,
            help=option.help.replace("[", r"\["),  # typer reads markup
            show_default=False if option.kind is dict else option.default,
            rich_help_panel=option.panel,
        )
        kind: Any = {int: int, float: float, dict: list[str]}.get(option.kind, str)
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, described])
