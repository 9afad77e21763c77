"""Cutting experiments into parts that can be trained one by one on different machines, and what each costs.

A unit is a set of cells that share runs: it does all of its rounds of choosing and all of its reported runs, so that no part waits for
another, and no run is trained in two parts. Units are taken experiment by experiment: next is the one that decides the most claims of the
paper per second, then those without such claims, the shortest first. The same experiments, seeds and number of parts give the same parts.

Costs are seconds on one H200, by a model of recorded times (`results/again/fleets.txt`):

    seconds(run) = tasks · epochs · EPOCH[stream, model] · METHOD[preserver] · (EVERYWHERE, if it acts in all layers) · (AUGMENTED)

where the time of a fleet is divided among its members. The later rounds of choosing have small fleets, in which a run costs LATER times as
much (`results/equal`: 357 s for 857 runs). A part adds START for loading and compiling, and a share SPARE for grids that are extended.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from selfless.experiments.base import Cell, Experiment
from selfless.experiments.choosing import later_trials, trial, trials
from selfless.experiments.reproduce import final, report_seeds
from selfless.preserve import NoPreserver
from selfless.sparsify import NoSparsifier
from selfless.spec import Run
from selfless.terms import Term

MOST = 25 * 60.0  # seconds of one part
OTHERS = "not in the paper"
START, SPARE = 60.0, 0.25
EPOCH = {  # seconds of an epoch of one task: by stream, and by the beginning of the network's name
    ("permuted-mnist", "mlp"): 0.003,
    ("permuted-mnist", "mlp-2000"): 0.05,
    ("joint-permuted-mnist", "mlp"): 0.010,
    ("split-cifar-100", "cnn"): 0.006,
    ("joint-split-cifar-100", "cnn"): 0.007,
    ("blurred-cifar-100", "cnn"): 0.07,
    ("split-tiny-imagenet", "vgg"): 0.10,
    ("objects", "alexnet"): 0.35,
}
OTHER = 0.5  # of a stream or network that is not in the table
METHOD = {"lwf": 2.0, "ebll": 3.5, "hat": 1.8, "rwalk": 2.0, "si": 1.6, "mas-local": 1.5}
ON_OBJECTS = {"lwf": 2.0, "ebll": 13.0}  # an autoencoder of 4,096 features
EVERYWHERE = 1.3  # between channels (docs/lab-notes/speed-gpu.md)
AUGMENTED = 1.2
LATER = {"mlp": 5.0}  # of other networks a run fills the GPU: 1.2


def seconds(run: Run) -> float:
    """Return the estimated training time of a run on one H200, in a fleet."""
    stream = run.stream.partition(":")[0]
    fits = {name: cost for (kind, name), cost in EPOCH.items() if kind == stream and run.model.startswith(name)}
    cost = fits[max(fits, key=len)] if fits else OTHER
    cost *= (ON_OBJECTS if stream == "objects" else METHOD).get(run.preserve.name, 1.0)
    wide = EVERYWHERE if run.layers == "all" else 1.0
    return (run.tasks or 5) * run.epochs * cost * wide * (AUGMENTED if run.augment != "none" else 1.0)


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

    first: dict[Hashable, int] = {}  # runs that differ in strengths alone → the first cell that needs them
    for i, cell in enumerate(cells):
        for kind in _kinds(cell):
            j = root(first.setdefault(kind, i))
            parent[max(j, root(i))] = min(j, root(i))
    groups: dict[int, list[Cell]] = {}
    for i, cell in enumerate(cells):
        groups.setdefault(root(i), []).append(cell)
    return [Unit(tuple(group), _cost(group, seeds)) for group in groups.values()]


def _kinds(cell: Cell) -> set[Hashable]:
    """Return the runs of a cell without their strengths and seeds, because a grid may grow to the strengths of another cell."""
    tried = [trial(run, 0, cell.choice) for run in cell.candidates] if len(cell.candidates) > 1 else []
    return {
        (dataclasses.replace(run, preserve=NoPreserver(), sparsify=NoSparsifier()), _method(run.preserve), _method(run.sparsify))
        for run in (*tried, *(final(cell, run, 0) for run in cell.candidates))
    }


def _method(term: Term) -> Hashable:
    return type(term), tuple((field.name, getattr(term, field.name)) for field in dataclasses.fields(term) if field.name != "strength")


def _cost(cells: Sequence[Cell], seeds: int) -> float:
    """Return the seconds of all rounds of choosing and of the reported runs; shared runs count once."""
    first = math.fsum(map(seconds, {run for cell in cells for run in trials(cell)}))
    return first + later_seconds(cells) + reported_seconds(cells, seeds)


def later_seconds(cells: Sequence[Cell]) -> float:
    """Return the seconds of the rounds of choosing after the first."""
    later = {(cell.candidates, cell.choice): later_trials(cell) for cell in cells}
    return math.fsum(count * _mean(runs) * LATER.get(runs[0].model[:3], 1.2) for (runs, _), count in later.items() if count)


def reported_seconds(cells: Sequence[Cell], seeds: int) -> float:
    """Return the seconds of the reported runs."""
    reported = {tuple(final(cell, run, 0) for run in cell.candidates): report_seeds(cell, seeds) for cell in cells}
    return math.fsum(count * _mean(runs) for runs, count in reported.items())


def _mean(runs: Sequence[Run]) -> float:
    return math.fsum(map(seconds, runs)) / len(runs)


def partition(experiments: Sequence[Experiment], seeds: int, parts: int) -> list[Part]:
    """Return the parts, of about the same length; the last are empty if there are more parts than units."""
    if parts < 1:
        raise ValueError(f"a study is cut into one part or more, not {parts}")
    made = units(_best_first(experiments, seeds), seeds)
    low, high = max((unit.seconds for unit in made), default=0.0), sum(unit.seconds for unit in made)
    while high - low > 1.0:  # the shortest limit at which the units fit into so many parts
        limit = (low + high) / 2
        low, high = (low, limit) if len(_cut(made, limit)) <= parts else (limit, high)
    cut = _cut(made, high)
    return [Part(number, parts, tuple(cut[number - 1]) if number <= len(cut) else ()) for number in range(1, parts + 1)]


def plan(experiments: Sequence[Experiment], seeds: int, most: float = MOST) -> list[Part]:
    """Return as few parts as possible that take at most `most` seconds each; a unit that takes longer is a part by itself."""
    made = units(experiments, seeds)
    longest = max((unit.seconds for unit in made), default=0.0)
    limit = max((most - START) / (1 + SPARE), longest)
    least = len(_cut(units(_best_first(experiments, seeds), seeds), limit))
    return partition(experiments, seeds, max(1, least))


def completed(experiments: Sequence[Experiment], parts: Sequence[Part]) -> list[list[str]]:
    """Return for each part the experiments whose last cells it trains."""
    done, found = set[int](), []
    left = {one.name: some for one in experiments if (some := {id(cell) for cell in one.cells if cell.candidates})}
    for part in parts:
        done |= {id(cell) for cell in part.cells}
        found.append([name for name, cells in left.items() if cells <= done])
        left = {name: cells for name, cells in left.items() if not cells <= done}
    return found


def _best_first(experiments: Sequence[Experiment], seeds: int) -> list[Experiment]:
    """Order by claims of the paper per second; what an experiment shares with those before it costs nothing."""
    made = units(experiments, seeds)
    home = {id(cell): number for number, unit in enumerate(made) for cell in unit.cells}
    needs = {one.name: {home[id(cell)] for cell in one.cells if cell.candidates} for one in experiments}
    left, order, done = list(experiments), list[Experiment](), set[int]()

    def rate(one: Experiment) -> tuple[float, float]:
        cost = sum(made[number].seconds for number in needs[one.name] - done)
        return sum(not (claim.ours or claim.repeats) for claim in one.claims) / (cost + 1e-9) if one.source != OTHERS else 0.0, -cost

    while left:
        order.append(max(left, key=rate))
        left.remove(order[-1])
        done |= needs[order[-1].name]
    return order


def _cut(made: Sequence[Unit], limit: float) -> list[list[Unit]]:
    """Fill one part after the other, each up to the limit."""
    found: list[list[Unit]] = [[]]
    for unit in made:
        if found[-1] and sum(u.seconds for u in found[-1]) + unit.seconds > limit:
            found.append([])
        found[-1].append(unit)
    return found


def read_part(text: str) -> tuple[int, int]:
    """Return (i, n) of "i/n"."""
    number, slash, of = text.partition("/")
    if not (slash and number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise ValueError(f"--part {text!r} is not a part: write i/n with 1 ≤ i ≤ n, for example --part 2/6")
    return int(number), int(of)
