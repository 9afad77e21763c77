"""Commands whose help shows a flag as a flag, `--force`, not `--force <bool>`, and takes a quarter of a second."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

UNUSED = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}  # module → the only name that typer takes from it


def _without_type(parameters: list[Any]) -> list[Any]:
    """Return the parameters, with no type in the help of those that take no value (--help too)."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


def _import_help() -> None:
    """Import typer's help without what our help does not use: Markdown and coloured tracebacks take a third of the time of `--help`."""
    empty = {name: ModuleType(name) for name in UNUSED if name not in sys.modules}
    for name, module in empty.items():
        setattr(module, UNUSED[name], object)
    sys.modules |= empty
    try:
        import typer.rich_utils  # noqa: F401
    finally:
        for name in empty:
            del sys.modules[name]


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _import_help()
        super().format_help(ctx, formatter)


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _import_help()
        super().format_help(ctx, formatter)


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
