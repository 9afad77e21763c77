"""Live progress of training: lines that are redrawn in a terminal, and a plain line now and then in a log file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.text import Text

from selfless.cli.lines import bar, clock, describe, is_over, label, wrap

if TYPE_CHECKING:
    from selfless.engine.progress import Event
    from selfless.spec import Run

    Follow = Callable[[Sequence[Run], Event], None]

PAUSE = 10.0  # seconds between two lines in a log file, at least
LINES = 20  # the pause grows with the time so far, so that each doubling of it adds about so many lines
WIDE = 96  # columns from which a bar is drawn
ASIDE = 4  # columns that stay free, so that the ^C of the terminal does not start a new line


class Fleets:
    """The last event of each fleet, and the time since the first began to train. `total` is the number of runs to train."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.started: float | None = None
        self.events: dict[tuple[str, ...], tuple[str, Event]] = {}
        self._continued: set[tuple[str, ...]] = set()

    def put(self, members: Sequence[Run], event: Event) -> None:
        if self.started is None and event.tasks:
            self.started = time.monotonic()
        self.events[tuple(run.key for run in members)] = label(members), event

    def continues(self, members: Sequence[Run], event: Event) -> str:
        """Return a line if this is the first event of a fleet that goes on from a saved epoch; else nothing."""
        keys = tuple(run.key for run in members)
        if not event.resumed or not event.tasks or keys in self._continued:
            return ""
        self._continued.add(keys)
        return f"{label(members)}: goes on from the last saved epoch, at task {event.task + 1} of {event.tasks}, epoch {event.epoch}"

    @property
    def running(self) -> list[tuple[str, Event]]:
        return [(name, event) for name, event in self.events.values() if not is_over(event)]

    def overall(self) -> list[str]:
        """Return how many runs are done and the time left, if one fleet does not say it all; else nothing."""
        begun = sum(map(len, self.events))
        if not self.events:
            return ["starting"]
        if begun >= self.total and len(self.events) == 1:
            return []
        done = min(self.total, sum(len(keys) for keys, (_, event) in self.events.items() if is_over(event)))
        left = self._seconds_left(self.total - begun)
        return [f"{done} of {self.total} runs done", *([] if left is None or done == self.total else [f"all in {clock(left)}"])]

    def _seconds_left(self, waiting: int) -> float | None:
        """Return the seconds to the end of all fleets, of which `waiting` runs have not begun; None if it is not known."""
        from selfless.runner.study import estimate

        if waiting <= 0:
            return max((event.seconds_left for _, event in self.running if event.seconds_left is not None), default=None)
        shares = [event.share for keys, (_, event) in self.events.items() for _ in keys]
        return None if self.started is None else estimate(time.monotonic() - self.started, [*shares, *[0.0] * waiting])

    def lines(self, width: int, marks: str = "━─") -> list[Text]:
        """Return a line or more for every fleet that runs, its name in bold, and one for all. A bar of two marks is drawn where it fits."""
        found = []
        for name, event in self.running:
            bars = [bar(event.share, marks)] if width >= WIDE and event.tasks else []
            first, *more = wrap([name, *bars, *describe(event)], width)
            found += [Text.assemble((first[: len(name)], "bold"), first[len(name) :]), *map(Text, more)]
        return [*found, *map(Text, wrap(self.overall(), width))]


@contextmanager
def progress_lines(console: Console, total: int, *, pause: float = PAUSE) -> Iterator[Follow]:
    """Yield `follow(runs of a fleet, event)`, which shows method, task, epoch, accuracy, speed and time left.

    total   the number of runs to train
    pause   seconds between two lines where there is no terminal that can redraw
    """
    fleets = Fleets(total)
    show = _redrawn if can_redraw(console) else _logged
    try:
        with show(console, fleets, pause) as put:

            def follow(members: Sequence[Run], event: Event) -> None:
                if line := fleets.continues(members, event):
                    console.print(Text(line), soft_wrap=True)
                put(members, event)

            yield follow
    except KeyboardInterrupt:
        for line in fleets.lines(console.width if can_redraw(console) else 10**6):
            console.print(line, soft_wrap=True)
        raise


def can_redraw(console: Console) -> bool:
    """Return True for a terminal with a cursor that can be moved; False for a file, a pipe and TERM=dumb."""
    return console.is_terminal and not console.is_dumb_terminal


def fit(lines: Sequence[Text], console: Console) -> Group:
    """Return as many lines as the terminal is high; the last then says how many are left out."""
    most = max(1, console.height - 2)
    return Group(*(lines if len(lines) <= most else [*lines[: most - 1], Text(f"and {len(lines) - most + 1} lines more")]))


@contextmanager
def _redrawn(console: Console, fleets: Fleets, _pause: float) -> Iterator[Follow]:
    from rich.live import Live

    def draw() -> RenderableType:
        return fit(fleets.lines(max(10, console.width - ASIDE), "━─" if console.encoding.startswith("utf") else "#-"), console)

    with Live(console=console, get_renderable=draw, transient=True, refresh_per_second=4):
        yield fleets.put


@contextmanager
def _logged(console: Console, fleets: Fleets, pause: float) -> Iterator[Follow]:
    started = last = time.monotonic()

    def follow(members: Sequence[Run], event: Event) -> None:
        nonlocal last
        fleets.put(members, event)
        now = time.monotonic()
        if now - last >= max(pause, (now - started) / LINES):
            last = now
            console.print(Text(", ".join([label(members), *describe(event), *fleets.overall()])), soft_wrap=True)

    yield follow
