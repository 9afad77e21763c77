"""The terminal: names of streams, networks and tasks are printed as they are, never read as markup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def open_console(**options: Any) -> Console:
    """Return a console that prints "[/b]" and ":star:" as they are; styles come from `rich.text.Text` and `style=`."""
    from rich.console import Console

    return Console(markup=False, emoji=False, **options)
