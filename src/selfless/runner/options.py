"""How to train, as one value: what every function between a command and the learner needs to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from selfless.engine.progress import Event
from selfless.spec import Run

Watch = Callable[[Sequence[Run], Event], None]


@dataclass(frozen=True)
class TrainOptions:
    """How to train, beside what to train. None of it changes the numbers on a device.

    out           folder where results are recorded and looked up; None: nothing is kept
    device        "auto" (a GPU if there is one), "cpu", "cuda", …
    workers       processes on a CPU; None: one per core, at most one per run
    data_dir      folder with data sets; None: $SELFLESS_DATA, else the user's cache
    budget        bytes of data to keep in memory; larger data is read from a memory map
    force         train again what is recorded
    checkpoints   record trained parameters and importances with the numbers
    watch         called with (runs of the fleet, Event) after every epoch and task
    waiting       called with a run that another process trains at the moment
    """

    out: Path | None = None
    device: str = "auto"
    workers: int | None = None
    data_dir: Path | None = None
    budget: int | None = None
    force: bool = False
    checkpoints: bool = True
    watch: Watch | None = None
    waiting: Callable[[Run], None] | None = None

    def __post_init__(self) -> None:
        # callers may give text; an empty data_dir is none
        object.__setattr__(self, "out", None if self.out is None else Path(self.out))
        object.__setattr__(self, "data_dir", Path(self.data_dir) if self.data_dir else None)
