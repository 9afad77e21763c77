"""Lines about training that fit into any width: the words of live progress, of log files, and of `selfless watch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selfless.engine.progress import Event
    from selfless.spec import Run


def label(members: Sequence[Run]) -> str:
    """Return what a fleet is called: the method and the number of runs."""
    return name_fleet([run.method for run in members])


def name_fleet(methods: Sequence[str]) -> str:
    """Return "mas:0.1", "mas:0.1 × 5 runs" or "3 methods × 15 runs" for the methods of a fleet's members."""
    different = list(dict.fromkeys(methods))
    what = different[0] if len(different) == 1 else f"{len(different)} methods"
    return what if len(methods) == 1 else f"{what} × {len(methods)} runs"


def describe(event: Event) -> list[str]:
    """Return the progress of a fleet in short phrases: task, epoch, accuracy so far, speed, time left."""
    if not event.tasks:
        return [event.stage]
    parts = [f"task {event.task + 1}/{event.tasks}", f"epoch {event.epoch}/{event.epochs}"]
    if event.stage != "training":
        parts.append(event.stage)
    if event.average:
        parts.append(f"test average {100 * _mean(event.average):.1f} %")
    if event.loss and not event.evaluated:
        parts += [f"train {100 * _mean(event.accuracy):.1f} %", f"loss {_mean(event.loss):.2f}"]
    if event.speed:
        parts.append(f"{short(event.speed)} steps/s")
    if event.seconds_left is not None and not is_over(event):
        parts.append(f"time left {clock(event.seconds_left)}")
    return parts


def is_over(event: Event) -> bool:
    """Return True after the last event of a fleet."""
    return event.evaluated and event.task + 1 == event.tasks


def clock(seconds: float) -> str:
    """Return a duration: "0:42", "12:05", "3 h 05 min", "2 d 4 h"."""
    whole = max(0, round(seconds))
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def short(number: float) -> str:
    """Return a number in four characters or so: "0.8", "812", "1.2k", "257k", "3.1M"."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            scaled = number / size
            return f"{scaled:.0f}{unit}" if scaled >= 99.95 else f"{scaled:.1f}{unit}"
    return f"{number:.0f}" if number >= 9.95 else f"{number:.1f}"


def bar(share: float, marks: str, width: int = 12) -> str:
    """Return a bar of `width` characters: the first mark for what is done, the second for the rest."""
    done = int(width * min(1.0, max(0.0, share)))
    return marks[0] * done + marks[1] * (width - done)


def wrap(parts: Sequence[str], width: int, *, indent: str = "  ", between: str = "  ") -> list[str]:
    """Join phrases to lines of at most `width` characters. A line ends between two phrases; a longer phrase is cut with "…"."""
    lines: list[str] = []
    for part in parts:
        joined = f"{lines[-1]}{between}{part}" if lines else part
        if lines and len(joined) > width:
            lines.append(cut(f"{indent}{part}", width))
        else:
            lines[-1:] = [cut(joined, width)]
    return lines


def cut(text: str, width: int) -> str:
    """Return the text, or its beginning with "…" if it is longer than `width` characters."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
