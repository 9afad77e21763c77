"""What an experiment is: cells to fill, candidates to choose from, published values, and claims. It is data without behaviour.

The candidates of a cell are whole runs (their seed does not matter). One of them is chosen, trained with every seed, and measured. Equal
candidates are equal runs, so a run that two experiments share is trained once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from selfless.spec import Run

Profile = Literal["paper", "ours", "equal"]
PROFILES: tuple[Profile, ...] = ("paper", "ours", "equal")
By = Literal["held-out", "test", "rule-largest", "rule-smallest"]
Place = tuple[str, str]  # (row, column)
Figure = Literal["bars", "dots", "pairs", "curves", "histogram", "importance", "rule", "gain"]


@dataclass(frozen=True)
class Choice:
    """How one candidate is chosen from several.

    by          "held-out": the highest average accuracy on held-out data after the last task, mean over `seeds`
                "test": the same on the test data, as the authors' "report the best one" (marked in every table)
                "rule-largest", "rule-smallest": the paper's rule of thumb (sec. 4.1), by the first task's held-out accuracy alone
    seeds       seeds of the choosing runs; with "test" these are seeds that are also reported, else they are different ones
    tasks       how many of the first tasks to choose by (None: all); ignored with "test", whose runs are reported
    tolerance   for the rules: how many points of accuracy a λ may lose against training without a sparsifier
    extend      how many values may be added at each end of a grid of λ_Ω or λ while the best candidate stands there
    refine      add the half decades next to the best candidate, once
    rounds      (how many of the best go on, the seeds they are scored by too); the mean over all seeds of the last round decides
    """

    by: By = "held-out"
    seeds: tuple[int, ...] = (100, 101)
    held_out: float = 0.1
    tasks: int | None = None
    tolerance: float = 0.5
    extend: int = 0
    refine: bool = False
    rounds: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds of a candidate that reaches the last round, in the order of its scores."""
        return (*self.seeds, *(seed for _, seeds in self.rounds for seed in seeds))

    @property
    def on_test(self) -> bool:
        """True if test data decides."""
        return self.by == "test"


EQUAL = Choice("held-out", (100,), extend=4, refine=True, rounds=((4, (101,)), (2, (102, 103, 104))))  # every choice of profile `equal`


@dataclass(frozen=True)
class Cell:
    """One number of a table.

    candidates   runs to choose from; none if nothing can be run (yet)
    value        what is measured, a name of `selfless.experiments.measures.MEASURES`
    then         fields of the chosen run that change after choosing, such as {"tasks": 1}
    most_seeds   how many seeds are reported at most, where runs are expensive; None: as many as asked for
    """

    row: str
    column: str
    candidates: tuple[Run, ...] = ()
    published: float | None = None
    value: str = "average"
    choice: Choice = field(default_factory=Choice)
    then: Mapping[str, Any] = field(default_factory=dict)
    most_seeds: int | None = None

    @property
    def place(self) -> Place:
        return self.row, self.column


@dataclass(frozen=True)
class Comparison:
    """mean(a − b) ≥ margin, > margin or ≤ margin, in points, with a and b paired by seed.

    b            None: the value of a itself is compared
    published    the paper's difference
    every_task   compare the accuracy on each task after the last one, not the averages
    since        a column whose value in the same row is subtracted first: what a and b have gained since then is compared
    """

    a: Place
    b: Place | None
    relation: Literal["≥", ">", "≤"] = "≥"
    margin: float = 0.0
    published: float | None = None
    every_task: bool = False
    since: str = ""

    def __str__(self) -> str:
        return self._averages() + ", in every task" * self.every_task + (f", minus that {self.since}" if self.since else "")

    def _averages(self) -> str:
        row, column = self.a
        if self.b is None:
            return f"{row} {self.relation} {self.margin:g} ({column})"
        other, against = self.b
        margin = f" {'+' if self.margin > 0 else '−'} {abs(self.margin):g}" if self.margin else ""
        if column == against:
            return f"{row} {self.relation} {other}{margin}" + (f" ({column})" if column else "")
        return f"{row} ({column}) {self.relation} {other} ({against}){margin}"


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper (or ours), which holds if all its comparisons hold.

    repeats   the experiments that make this claim too, where it is counted; "" if it is counted here
    """

    text: str
    parts: tuple[Comparison, ...]
    ours: bool = False
    repeats: str = ""


@dataclass(frozen=True)
class Experiment:
    """A table or figure: what to run, what was published, what is claimed.

    source    its place in the paper, or "not in the paper"
    figure    how the report draws it
    pending   what is not run yet, and why
    notes     what a reader of its table must know
    """

    name: str
    title: str
    source: str
    figure: Figure
    cells: tuple[Cell, ...]
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    pending: str = ""
    profile: Profile = "ours"
    quick: bool = False

    def __post_init__(self) -> None:
        places = [cell.place for cell in self.cells]
        twice = {place for place in places if places.count(place) > 1}
        if twice:
            raise ValueError(f"{self.name} has two cells at {sorted(twice)[0]}")
        for claim in self.claims:
            for part in claim.parts:
                before = [(place[0], part.since) for place in (part.a, part.b) if place is not None and part.since]
                for place in (part.a, part.b, *before):
                    if place is not None and place not in places:
                        raise ValueError(f"{self.name}: the claim {claim.text!r} names {place}, which is not one of its cells")
                    if part.every_task and any(cell.value != "average" for cell in self.cells if cell.place == place):
                        raise ValueError(
                            f"{self.name}: the claim {claim.text!r} compares every task, but {place} is not an average over tasks"
                        )


def at_least(a: Place, b: Place | None, margin: float = 0.0, published: float | None = None, *, every_task: bool = False) -> Comparison:
    """a ≥ b + margin."""
    return Comparison(a, b, "≥", margin, published, every_task)


def more(
    a: Place, b: Place, margin: float = 0.0, published: float | None = None, *, every_task: bool = False, since: str = ""
) -> Comparison:
    """a > b + margin, for "ahead" and "helps": a tie is neither."""
    return Comparison(a, b, ">", margin, published, every_task, since)


def at_most(a: Place, b: Place | None, margin: float = 0.0, published: float | None = None) -> Comparison:
    """a ≤ b + margin."""
    return Comparison(a, b, "≤", margin, published)
