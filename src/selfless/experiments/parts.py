"""Cutting experiments into parts that can be trained one by one on different machines, and what each costs.

A unit is a set of cells that share runs: it does all of its rounds of choosing and all of its reported runs, so that no part waits for
another, and no run is trained in two parts. `partition` gives the most expensive unit that is left to the part with the least work. The
same experiments, seeds and number of parts give the same parts.

Costs are seconds on one H200, by a model of recorded times (`results/reproduction/runs.jsonl.xz`):

    seconds(run) = tasks · epochs · EPOCH[stream, model] · METHOD[preserver] · (EVERYWHERE, if it acts in all layers)

where the time of a fleet is divided among its members. A part adds START for loading and compiling, and a share SPARE for grids that are
extended and for fleets that are smaller than the recorded ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from selfless.experiments.base import Cell, Experiment
from selfless.experiments.choosing import trials
from selfless.experiments.reproduce import final
from selfless.spec import Run

MOST = 25 * 60.0  # seconds of one part
START, SPARE = 60.0, 0.3
EPOCH = {  # seconds of an epoch of one task: by stream, and by the beginning of the network's name
    ("permuted-mnist", "mlp"): 0.009,
    ("permuted-mnist", "mlp-2000"): 0.05,
    ("joint-permuted-mnist", "mlp"): 0.010,
    ("split-cifar-100", "cnn"): 0.012,
    ("joint-split-cifar-100", "cnn"): 0.007,
    ("blurred-cifar-100", "cnn"): 0.1,
    ("split-tiny-imagenet", "vgg"): 0.18,
    ("objects", "alexnet"): 0.35,
}
OTHER = 0.5  # of a stream or network that is not in the table
METHOD = {"lwf": 2.0, "ebll": 3.5, "hat": 1.8, "rwalk": 2.0, "si": 1.6, "mas-local": 1.5}
ON_OBJECTS = {"lwf": 2.0, "ebll": 13.0}  # an autoencoder of 4,096 features
EVERYWHERE = {"cnn": 2.5}  # between channels; 1.3 for other networks


def seconds(run: Run) -> float:
    """Return the estimated training time of a run on one H200, in a fleet."""
    stream = run.stream.partition(":")[0]
    fits = {name: cost for (kind, name), cost in EPOCH.items() if kind == stream and run.model.startswith(name)}
    cost = fits[max(fits, key=len)] if fits else OTHER
    cost *= (ON_OBJECTS if stream == "objects" else METHOD).get(run.preserve.name, 1.0)
    wide = EVERYWHERE.get(run.model.partition("-")[0], 1.3) if run.layers == "all" else 1.0
    return (run.tasks or 5) * run.epochs * cost * wide


@dataclass(frozen=True)
class Unit:
    """Cells that share runs, and the seconds that all of their runs take."""

    cells: tuple[Cell, ...]
    seconds: float

    @property
    def rows(self) -> tuple[str, ...]:
        """The cells by name, "row (column)", each once."""
        return tuple(dict.fromkeys(f"{cell.row} ({cell.column})" if cell.column else cell.row for cell in self.cells))


@dataclass(frozen=True)
class Part:
    """One part of `of`, numbered from 1."""

    number: int
    of: int
    units: tuple[Unit, ...]

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(cell for unit in self.units for cell in unit.cells)

    @property
    def seconds(self) -> float:
        """The estimated time on one H200."""
        return START + (1 + SPARE) * sum(unit.seconds for unit in self.units) if self.units else 0.0


def units(experiments: Sequence[Experiment], seeds: int) -> list[Unit]:
    """Return the cells of these experiments in sets that share no run, in the order of their first cells."""
    cells = [cell for experiment in experiments for cell in experiment.cells if cell.candidates]
    parent = list(range(len(cells)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    first: dict[tuple[Run, bool], int] = {}  # a run, and whether it is a reported one → the first cell that needs it
    for i, cell in enumerate(cells):
        for run in _runs(cell):
            j = root(first.setdefault(run, i))
            parent[max(j, root(i))] = min(j, root(i))
    groups: dict[int, list[Cell]] = {}
    for i, cell in enumerate(cells):
        groups.setdefault(root(i), []).append(cell)
    return [Unit(tuple(group), _cost(group, seeds)) for group in groups.values()]


def _runs(cell: Cell) -> Iterator[tuple[Run, bool]]:
    yield from ((run, cell.choice.on_test) for run in trials(cell))
    yield from ((final(cell, run, 0), True) for run in cell.candidates)


def _cost(cells: Sequence[Cell], seeds: int) -> float:
    """Return the seconds of all rounds of choosing and of the reported runs; shared runs count once."""
    tried = {run for cell in cells for run in trials(cell)}
    total = sum(map(seconds, tried))
    second = {(cell.candidates, cell.choice) for cell in cells if len(cell.candidates) > 1 and cell.choice.finalists}
    for candidates, choice in second:
        count = min(choice.finalists, len(candidates)) * len(choice.more_seeds)
        total += count * math.fsum(map(seconds, candidates)) / len(candidates)
    reported = {tuple(final(cell, run, 0) for run in cell.candidates) for cell in cells}
    return total + sum(seeds * math.fsum(map(seconds, runs)) / len(runs) for runs in reported)


def partition(experiments: Sequence[Experiment], seeds: int, parts: int) -> list[Part]:
    """Return the parts; one is empty if there are more parts than units."""
    if parts < 1:
        raise ValueError(f"a study is cut into one part or more, not {parts}")
    return _share(units(experiments, seeds), parts)


def plan(experiments: Sequence[Experiment], seeds: int, most: float = MOST) -> list[Part]:
    """Return as few parts as possible that take at most `most` seconds each; a unit that takes longer is a part by itself."""
    made = units(experiments, seeds)
    longest = max((unit.seconds for unit in made), default=0.0)
    limit = max(most, START + (1 + SPARE) * longest)
    tried = (_share(made, parts) for parts in itertools.count(1))
    return next(found for found in tried if all(part.seconds <= limit for part in found))


def _share(made: Sequence[Unit], parts: int) -> list[Part]:
    shares: list[list[Unit]] = [[] for _ in range(parts)]
    for unit in sorted(made, key=lambda unit: -unit.seconds):  # a stable sort: equal costs keep their order
        min(shares, key=lambda share: sum(u.seconds for u in share)).append(unit)
    return [Part(number, parts, tuple(share)) for number, share in enumerate(shares, 1)]


def read_part(text: str) -> tuple[int, int]:
    """Return (i, n) of "i/n"."""
    number, slash, of = text.partition("/")
    if not (slash and number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise ValueError(f"--part {text!r} is not a part: write i/n with 1 ≤ i ≤ n, for example --part 2/6")
    return int(number), int(of)
