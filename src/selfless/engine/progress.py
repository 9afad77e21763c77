"""The progress of a fleet, and the events that it reports during training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """The end of an epoch or of a task (`evaluated`), or a moment between (`passing`), for a progress bar or a log.

    loss, accuracy   by member: of the training batches of the epoch, or, if `evaluated`, the average test accuracy so far
    average          by member: the average test accuracy over the tasks learnt so far; [] before the first task has ended
    penalties        {name: by member}, at the end of an epoch; the names are those of `selfless.engine.penalties`
    passing          the epoch is not over yet; `loss` and `accuracy` are those of the epoch before
    stage            what happens now: "training", "measuring importance", …
    share            how much of the whole training is done, 0 to 1
    speed            run-steps a second: the steps of all members; None before the first
    seconds_left     estimated seconds to the end; None while there is nothing to estimate from
    """

    task: int
    tasks: int
    name: str
    epoch: int
    epochs: int
    loss: list[float]
    accuracy: list[float]
    evaluated: bool = False
    resumed: bool = False
    average: list[float] = field(default_factory=list)
    penalties: dict[str, list[float]] = field(default_factory=dict)
    passing: bool = False
    stage: str = "training"
    share: float = 0.0
    speed: float | None = None
    seconds_left: float | None = None


Report = Callable[[Event], None]
PAUSE = 0.5  # seconds between two passing events
FEW, SOON = 10, 5.0  # the time left is not estimated from fewer steps in less time, in seconds


class Pace:
    """How far a training is, how fast it is, and how long it will take: from steps done, counted by the clock.

    The first step is not counted: it may take seconds, because threads start, memory is allocated and kernels are compiled.

    sizes   steps of one epoch, by task
    """

    def __init__(self, sizes: Sequence[int], epochs: int, members: int) -> None:
        self.sizes, self.epochs, self.members = list(sizes), epochs, members
        self.total = epochs * sum(self.sizes)
        self.done = self.first = 0
        self.started = self._said = time.perf_counter()
        self._epoch = (0, self.started)  # steps and time at the start of this epoch
        self._is_warm = False
        self.speed: float | None = None

    def place(self, task: int, epoch: int) -> None:
        """Set the place from which the clock counts: so many tasks and epochs are done."""
        self.done = self.first = self._steps(task, epoch)
        self.started = self._said = time.perf_counter()

    def _steps(self, task: int, epoch: int) -> int:
        return self.epochs * sum(self.sizes[:task]) + (epoch * self.sizes[task] if task < len(self.sizes) else 0)

    def begin_epoch(self, task: int, epoch: int) -> None:
        self.done = self._steps(task, epoch)
        self._epoch = (self.done, time.perf_counter())

    def step(self) -> bool:
        """Count one step; return True if the last passing event is PAUSE seconds ago."""
        self.done += 1
        now = time.perf_counter()
        if not self._is_warm:
            self._is_warm, self.first, self.started = True, self.done, now
            self._epoch = (self.done, now)
        if now - self._said < PAUSE:
            return False
        self._said = now
        self._measure(now)
        return True

    def end_epoch(self) -> None:
        self._measure(time.perf_counter())

    def _measure(self, now: float) -> None:
        steps, started = self.done - self._epoch[0], self._epoch[1]
        self.speed = self.members * steps / (now - started) if steps and now > started else self.speed

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 1.0

    @property
    def seconds_left(self) -> float | None:
        """(now − start) · steps to do / steps done: evaluations and consolidations count as part of their steps."""
        if self.done >= self.total:
            return 0.0
        done, spent = self.done - self.first, time.perf_counter() - self.started
        return spent * (self.total - self.done) / done if done >= FEW or (done > 0 and spent >= SOON) else None


@dataclass
class Progress:
    """The progress of a fleet, without its tensors. `epoch` is the number of finished epochs of `task`."""

    task: int = 0
    epoch: int = 0
    accuracy: list[list[list[float]]] = field(default_factory=list)  # [task][evaluated task][member]
    accuracy_all: list[list[list[float]]] = field(default_factory=list)
    held_out: list[list[list[float]]] = field(default_factory=list)
    baseline: list[list[float]] = field(default_factory=list)
    history: list[list[list[dict[str, float]]]] = field(default_factory=list)  # [member][task][epoch]
    capacity: list[list[dict[str, Any]]] = field(default_factory=list)  # [member][task]
    failed: dict[int, str] = field(default_factory=dict)
    best: list[float] = field(default_factory=list)
    best_held_out: list[float] = field(default_factory=list)
    stalled: list[int] = field(default_factory=list)
    over: bool = False  # True if the epochs of `task` ended early: every member stopped or failed
    seconds: float = 0.0
    training: float = 0.0  # the seconds in training steps
    run_steps: int = 0  # the sum of the steps of all members

    def text(self) -> str:
        """Return the progress as JSON."""
        return json.dumps({k: list(v.items()) if isinstance(v, dict) else v for k, v in self.__dict__.items()})

    @classmethod
    def parse(cls, text: str) -> Progress:
        """Return the progress that `text` describes."""
        values = json.loads(text)
        return cls(**(values | {"failed": {int(k): v for k, v in values["failed"]}}))
