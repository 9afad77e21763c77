"""A progress bar on standard error, shown on a terminal only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """A rich progress bar with the interface that pooch expects: `total`, `update`, `reset`, `close`."""

    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self._progress, self._total = progress, total
        self._task = progress.add_task(label, total=total)

    @property
    def total(self) -> int:
        return self._total

    @total.setter
    def total(self, value: int) -> None:
        self._total = value or self._total  # 0: the server did not send a length
        self._progress.update(self._task, total=self._total)

    def update(self, amount: int) -> None:
        """Advance by `amount`."""
        self._progress.advance(self._task, amount)

    def move_to(self, amount: int) -> None:
        """Set the completed amount."""
        self._progress.update(self._task, completed=amount)

    def reset(self) -> None:
        self._progress.reset(self._task, total=self._total)

    def close(self) -> None:
        """Do nothing: the bar ends with its `with` block."""


@contextmanager
def progress_bar(label: str, total: int, *, unit: str = "bytes") -> Iterator[Bar]:
    """Show a progress bar: `with progress_bar("decoding", n, unit="images") as bar: bar.update(1)`."""
    console = Console(stderr=True)
    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield Bar(progress, label, total)
