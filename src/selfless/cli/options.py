"""Options of the commands: those that several share, and those of `run`, which are the fields of `Run`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from selfless.fields import Option
from selfless.spec import Run

HOW = "How it runs"
Out = Annotated[Path | None, typer.Option(help="Folder in which results are recorded.", show_default="results", rich_help_panel=HOW)]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder with the data sets.", show_default="$SELFLESS_DATA, else the user's cache", rich_help_panel=HOW)
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


def with_run_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Put an option for every field of `Run` before the command's own. It gets them as `**fields`; None: not given.

    The real default is only shown, because a TOML file may set a field whose flag is not given.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters = [*_run_parameters(), *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own)]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads both
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


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
