"""Commands whose help shows a flag as a flag: `--force`, not `--force <bool>`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


def _without_type(parameters: list[Any]) -> list[Any]:
    """Return the parameters, with no type in the help of those that take no value (--help too)."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type(super().get_params(ctx))


class App(typer.Typer):
    """A typer application with such commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=_Group, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line. Ctrl-C before a command has begun is one line, too."""
        try:
            return super().__call__(*args, **kwargs)
        except KeyboardInterrupt:
            typer.secho("stopped", err=True)
            raise SystemExit(130) from None

    def command(self, name: str | None = None, **options: Any) -> Callable[..., Any]:
        return super().command(name, **({"cls": _Command} | options))
