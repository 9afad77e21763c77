"""Commands whose help shows a flag as a flag, `--force`, not `--force <bool>`; and a group that imports a command only when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

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

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse two methods of one kind. Of other options the last one counts, so that a script can override its own."""
        given = [word.partition("=")[0] for word in args]
        for name in ("--preserve", "--sparsify"):
            if (count := given.count(name)) > 1:
                raise typer.BadParameter(
                    f"{name} is given {count} times, but takes one method; selfless compare takes several, and a+b adds them"
                )
        return super().parse_args(ctx, args)


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type(super().get_params(ctx))


class App(typer.Typer):
    """A typer application with such commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"cls": _Group} | options))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line. Ctrl-C before a command has begun is one line, too."""
        try:
            return super().__call__(*args, **kwargs)
        except KeyboardInterrupt:
            typer.secho("stopped", err=True)
            raise SystemExit(130) from None

    def command(self, name: str | None = None, **options: Any) -> Callable[..., Any]:
        return super().command(name, **({"cls": _Command} | options))


@dataclass(frozen=True)
class Later:
    """A command that is imported when it is used.

    module     the module of this folder where it is
    name       its function, or a typer application with commands of its own
    help       the first paragraph of its help, for the list of commands
    examples   the variable with its examples
    """

    module: str
    name: str
    help: str
    examples: str = "EXAMPLES"

    def load(self, called: str) -> Any:
        """Import and return the command."""
        module = importlib.import_module(f"selfless.cli.{self.module}")
        found = getattr(module, self.name)
        if isinstance(found, typer.Typer):
            command: Any = typer.main.get_group(found)
        else:
            alone = App(add_completion=False, rich_markup_mode="rich")
            alone.command(called, epilog=getattr(module, self.examples))(found)
            command = typer.main.get_command(alone)
        command.name = called
        return command


class _Commands(Mapping[str, Any]):
    """Commands by name; each is imported when it is read."""

    def __init__(self, later: Mapping[str, Later]) -> None:
        self._later, self._loaded = later, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._later[name].load(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._later)

    def __len__(self) -> int:
        return len(self._later)


class LazyGroup(_Group):
    """A group of commands that are imported when they are used; its own help imports none of them."""

    later: ClassVar[Mapping[str, Later]] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: Any = _Commands(self.later)
        self._listing = False

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.later)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command; while the list of commands is printed, its name and its help alone."""
        if self._listing and cmd_name in self.later:
            return _Command(name=cmd_name, help=self.later[cmd_name].help)
        return self.commands.get(cmd_name)
