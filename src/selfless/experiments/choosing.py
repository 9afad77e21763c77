"""Choosing one candidate of a cell: `trials` returns the runs that score the candidates, `choose` picks one by their results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from selfless.experiments.base import Cell, Choice
from selfless.spec import Result, Run

NUMBERS: dict[str, Callable[[Run], float]] = {
    "λ_Ω": lambda run: run.preserve.fixed_strength,
    "λ": lambda run: run.sparsify.fixed_strength,
    "lr": lambda run: run.lr,
}


@dataclass(frozen=True)
class Selection:
    """The chosen candidate, and the scores of all.

    index    the number of the chosen candidate; None if all failed
    scores   for each candidate its score by seed, in percent
    edges    sentences on numbers that were chosen at an end of their grid
    """

    index: int | None
    scores: tuple[tuple[float, ...], ...]
    edges: tuple[str, ...] = ()


def trial(run: Run, seed: int, choice: Choice) -> Run:
    """Return the run that scores a candidate."""
    if choice.on_test:
        return dataclasses.replace(run, seed=seed)
    apart = dataclasses.replace(run, seed=seed, held_out=max(run.held_out, choice.held_out))
    first = choice.tasks if choice.by == "held-out" else 1
    return apart if first is None else dataclasses.replace(apart, tasks=min(first, run.tasks or first))


def first_tasks(cell: Cell) -> int | None:
    """Return how many of the first tasks decide for a cell; None for all of them."""
    limits = [(trial(run, 0, cell.choice).tasks, run.tasks) for run in cell.candidates]
    return next((used for used, of in limits if used != of), None) if cell.choice.by == "held-out" else None


def trials(cell: Cell) -> list[Run]:
    """Return every run that must be trained to choose; none if there is only one candidate."""
    if len(cell.candidates) < 2:
        return []
    return [trial(run, seed, cell.choice) for run in cell.candidates for seed in cell.choice.seeds]


def choose(cell: Cell, results: Mapping[Run, Result]) -> Selection:
    """Return the candidate that the results of `trials` choose."""
    if len(cell.candidates) < 2:
        return Selection(0 if cell.candidates else None, ())
    choice = cell.choice
    scores = tuple(tuple(_score(results[trial(run, seed, choice)], choice) for seed in choice.seeds) for run in cell.candidates)
    means = [float(np.mean(row)) for row in scores]  # NaN where a seed failed: such a candidate is never chosen
    index = _rule(cell.candidates, means, choice) if choice.by.startswith("rule") else _best(means)
    return Selection(index, scores, edges(cell.candidates, index) if index is not None else ())


def _score(result: Result, choice: Choice) -> float:
    if result.status != "done":
        return math.nan
    if choice.on_test:
        return 100 * result.average
    if result.held_out is None:
        raise ValueError(f"{result.run.key} has no held-out accuracy: it was recorded by an older version. Train it again with --force")
    return 100 * float(result.held_out[-1].mean())


def _best(means: Sequence[float]) -> int | None:
    known = [i for i, mean in enumerate(means) if not math.isnan(mean)]
    return max(known, key=lambda i: means[i]) if known else None


def _rule(candidates: Sequence[Run], means: Sequence[float], choice: Choice) -> int | None:
    """Return the largest (or smallest) strength that keeps the unregularised accuracy on the first task; the weakest if none does."""
    reference = next((m for run, m in zip(candidates, means, strict=True) if not run.sparsify.is_on), math.nan)
    if math.isnan(reference):
        raise ValueError("the rule of thumb compares with no regularisation; give one candidate the sparsifier 'none'")
    inhibited = [i for i, run in enumerate(candidates) if run.sparsify.is_on and not math.isnan(means[i])]
    kept = [i for i in inhibited if means[i] >= reference - choice.tolerance]
    largest = choice.by == "rule-largest" and bool(kept)
    return (max if largest else min)(kept or inhibited, key=lambda i: candidates[i].sparsify.strength, default=None)


def edges(candidates: Sequence[Run], index: int) -> tuple[str, ...]:
    """Return a sentence for each number chosen at an end of its grid, where a wider grid might do better. λ = 0 is not part of a grid."""
    found = []
    for name, of in NUMBERS.items():
        values = sorted({of(run) for run in candidates if name != "λ" or of(run) > 0})
        if len(values) > 1 and of(candidates[index]) in (values[0], values[-1]):
            found.append(f"{name} = {of(candidates[index]):g} is an end of its grid")
    return tuple(found)
