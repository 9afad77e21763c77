"""How to train, as one value that is passed from a command to the learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from selfless.engine.progress import Event
from selfless.inputs import show
from selfless.spec import Run

ENGINES = ("local", "ray")
Watch = Callable[[Sequence[Run], Event], None]


@dataclass(frozen=True)
class TrainOptions:
    """Settings of how to train. On one device they do not change the numbers of a result.

    out           folder where results are recorded and looked up; None: nothing is recorded
    device        "auto" (a GPU if there is one), "cpu", "cuda", …
    workers       processes on a CPU; None: one per core, at most one per run
    data_dir      folder with data sets; None: $SELFLESS_DATA, else the user's cache
    parents       folder with the finished runs that runs continue; None: `out`
    budget        bytes of data to keep in memory; larger data is read from a memory map
    force         train runs again that are already recorded
    checkpoints   also record trained parameters and importances
    deterministic   the same bits in every training on one GPU, with slower algorithms; on a CPU they are the same anyway
    watch         called with (runs of the fleet, Event) after every epoch and task
    follow        called as `watch`, and also at the start of every epoch and about twice a second within one (Event.passing)
    waiting       called with a run that another process is training, before waiting for it
    engine        "local": this machine; "ray": the nodes of a Ray cluster
    address       the Ray cluster: "auto" on one of its machines, HOST:PORT; None: $RAY_ADDRESS, else a Ray of its own on this machine
    """

    out: Path | None = None
    device: str = "auto"
    workers: int | None = None
    data_dir: Path | None = None
    parents: Path | None = None
    budget: int | None = None
    force: bool = False
    checkpoints: bool = True
    deterministic: bool = False
    watch: Watch | None = None
    follow: Watch | None = None
    waiting: Callable[[Run], None] | None = None
    engine: str = "local"
    address: str | None = None

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine {show(self.engine)} is not known; choose {' or '.join(ENGINES)}")
        if self.address is not None and self.engine == "local":
            raise ValueError(f"address {show(self.address)} is that of a Ray cluster; add --engine ray, or engine='ray'")
        # a path may be given as text; an empty data_dir or parents means None
        object.__setattr__(self, "out", None if self.out is None else Path(self.out))
        for name in ("data_dir", "parents"):
            object.__setattr__(self, name, Path(getattr(self, name)) if getattr(self, name) else None)

    def tell(self, runs: Sequence[Run], event: Event) -> None:
        """Call `watch` and `follow` with an event of a fleet; `watch` does not get passing ones."""
        if self.watch is not None and not event.passing:
            self.watch(runs, event)
        if self.follow is not None:
            self.follow(runs, event)
