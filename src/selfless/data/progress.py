"""A progress bar on standard error: seen on a terminal, silent anywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """What pooch asks of a progress bar (`total`, `update`, `reset`, `close`), over rich's."""

    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self._progress, self._total = progress, total
        self._task = progress.add_task(label, total=total)

    @property
    def total(self) -> int:
        return self._total

    @total.setter
    def total(self, value: int) -> None:
        self._total = value or self._total  # 0: the server did not say
        self._progress.update(self._task, total=self._total)

    def update(self, amount: int) -> None:
        self._progress.advance(self._task, amount)

    def at(self, amount: int) -> None:
        self._progress.update(self._task, completed=amount)

    def reset(self) -> None:
        self._progress.reset(self._task, total=self._total)

    def close(self) -> None:
        """The bar ends with its `with` block."""


@contextmanager
def bar(label: str, total: int, *, unit: str = "bytes") -> Iterator[Bar]:
    """`with bar("decoding", n, unit="images") as b: b.update(1)`."""
    console = Console(stderr=True)
    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield Bar(progress, label, total)
