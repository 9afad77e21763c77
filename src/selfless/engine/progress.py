"""The progress of a fleet, and the events that it reports during training."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """The end of an epoch, or of a task (`evaluated`), for a progress bar or a log. `loss` and `accuracy` are by member."""

    task: int
    tasks: int
    name: str
    epoch: int
    epochs: int
    loss: list[float]
    accuracy: list[float]
    evaluated: bool = False
    resumed: bool = False


Report = Callable[[Event], None]


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
