"""Live progress of training in the terminal: one bar per fleet, nothing where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from selfless.engine.progress import Event
    from selfless.spec import Run


@contextmanager
def progress_bars(console: Console) -> Iterator[Any]:
    """Yield `watch(runs of a fleet, event)`, which shows task, epoch, loss, accuracy and the time left; None without a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}", style="bold"),
        BarColumn(bar_width=None if console.width > 100 else 6),
        TextColumn("{task.fields[where]}"),
        TextColumn("{task.fields[numbers]}", style="cyan"),
        TimeRemainingColumn(compact=True),
    )
    bars: dict[tuple[str, ...], Any] = {}
    with Progress(*columns, console=console) as progress:
        starting = progress.add_task("starting", total=None, where="loading the data", numbers="")

        def watch(members: Sequence[Run], event: Event) -> None:
            progress.update(starting, visible=False)
            key = tuple(r.key for r in members)
            total = event.tasks * event.epochs
            if key not in bars:
                bars[key] = progress.add_task(label(members), total=total, where="", numbers="")
            done = event.task * event.epochs + event.epoch
            where = f"task {event.task + 1}/{event.tasks} epoch {event.epoch}/{event.epochs}"
            if event.evaluated:
                numbers = f"test average {100 * _mean(event.accuracy):.1f} %"
            else:
                numbers = f"loss {_mean(event.loss):.2f} train {100 * _mean(event.accuracy):.1f} %"
            progress.update(bars[key], completed=done, where=where, numbers=numbers)

        yield watch


def label(members: Sequence[Run]) -> str:
    """What a bar is called: the method and the number of runs."""
    methods = list(dict.fromkeys(r.method for r in members))
    what = methods[0] if len(methods) == 1 else f"{len(methods)} methods"
    return what if len(members) == 1 else f"{what} × {len(members)} runs"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
