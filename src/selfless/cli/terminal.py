"""The terminal: names of streams, networks and tasks are printed as they are, never read as markup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def open_console(**options: Any) -> Console:
    """Return a console that prints "[/b]" and ":star:" as they are; styles come from `rich.text.Text` and `style=`."""
    from rich.console import Console

    class Ours(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with 1; the caller ends as by SIGPIPE
            raise BrokenPipeError

    return Ours(markup=False, emoji=False, **options)
