"""Choosing one candidate of a cell: `next_trials` returns the runs that are needed next, `choose` picks a candidate by their results.

Most choices have one round: all candidates are scored by all seeds. A choice with `extend`, `refine` and `rounds` gives every row equal
chances:

    1. all candidates are scored by the first seeds
    2. while the best stands at an end of its grid of λ_Ω or λ, the next value there is added, at most `extend` values at each end
    3. the half decades next to the best are added, if the grid has decades
    4. in each round the best few are scored by more seeds; the highest mean over all seeds wins
    5. if the winner stands at an end that may still be extended, the grid grows there, and all but step 3 is done again

Which runs are needed is a function of the results so far, so that an interrupted choice continues where it stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from selfless.experiments.base import Cell, Choice
from selfless.experiments.grids import edges, extend, middle, refine
from selfless.spec import Result, Run


@dataclass(frozen=True)
class RecordedScore:
    """The held-out score of a run whose result is not kept, from the record of an experiment.

    score       in percent
    seconds     its training time; that of a fleet is divided among its members; None if unknown
    made_from   digest of the custom files that it depended on (Store.made_from)
    about       the record's hardware, versions of torch and commits, which may include those of other runs
    """

    score: float
    seconds: float | None = None
    made_from: str = ""
    about: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


Scored = Result | RecordedScore


@dataclass(frozen=True)
class Selection:
    """The chosen candidate, and the scores of all.

    index        the number of the chosen candidate; None if all failed
    scores       for each candidate its score by seed, in percent; finalists have more of them
    edges        sentences on numbers that were chosen at an end of their grid
    candidates   those of the cell, then those that were added at the ends of its grid
    """

    index: int | None
    scores: tuple[tuple[float, ...], ...]
    edges: tuple[str, ...] = ()
    candidates: tuple[Run, ...] = ()


@functools.lru_cache(2**16)  # the rounds of a choice ask for the same runs again and again
def trial(run: Run, seed: int, choice: Choice) -> Run:
    """Return the run that scores a candidate."""
    if choice.on_test:
        return dataclasses.replace(run, seed=seed)
    first = choice.tasks if choice.by == "held-out" else 1
    tasks = run.tasks if first is None else min(first, run.tasks or first)
    return dataclasses.replace(run, seed=seed, held_out=max(run.held_out, choice.held_out), tasks=tasks)


def first_tasks(cell: Cell) -> int | None:
    """Return how many of the first tasks decide for a cell; None for all of them."""
    limits = [(trial(run, 0, cell.choice).tasks, run.tasks) for run in cell.candidates]
    return next((used for used, of in limits if used != of), None) if cell.choice.by == "held-out" else None


def trials(cell: Cell) -> list[Run]:
    """Return the runs of the first round, which depend on no result; none if there is only one candidate."""
    if len(cell.candidates) < 2:
        return []
    return [trial(run, seed, cell.choice) for run in cell.candidates for seed in cell.choice.seeds]


def later_trials(cell: Cell) -> int:
    """Return how many runs the later rounds of a choice take if its best candidate is in the middle of the grid."""
    if len(cell.candidates) < 2:
        return 0
    grown = cell.candidates
    if cell.choice.extend:
        grown += extend(grown, grown, middle(grown), cell.choice.extend)  # an axis of two values has no middle
    if cell.choice.refine:
        grown += refine(grown, middle(grown))
    again = sum(min(count, len(grown)) * len(seeds) for count, seeds in cell.choice.rounds)
    return (len(grown) - len(cell.candidates)) * len(cell.choice.seeds) + again


def next_trials(cell: Cell, results: Mapping[Run, Scored]) -> list[Run]:
    """Return the runs that must be trained next to choose, given the results so far; none if the choice is made."""
    found = _proceed(cell, results)
    return found if isinstance(found, list) else []


def choose(cell: Cell, results: Mapping[Run, Scored]) -> Selection:
    """Return the candidate that the results choose."""
    found = _proceed(cell, results)
    if isinstance(found, list):
        raise KeyError(f"{cell.row}, {cell.column}: {len(found)} runs that choose it are not trained yet")
    return found


def _proceed(cell: Cell, results: Mapping[Run, Scored]) -> Selection | list[Run]:
    """Return the selection, or the runs that are missing for the next step."""
    if len(cell.candidates) < 2:
        return Selection(0 if cell.candidates else None, (), candidates=cell.candidates)
    choice, candidates, refined = cell.choice, cell.candidates, not cell.choice.refine
    while True:
        first = [trial(run, seed, choice) for run in candidates for seed in choice.seeds]
        if missing := [run for run in first if run not in results]:
            return missing
        scores = [_scores(run, choice.seeds, choice, results) for run in candidates]
        index = _pick(candidates, _means(scores), choice)
        if index is not None and (more := extend(cell.candidates, candidates, index, choice.extend)):
            candidates += more
            continue
        if index is not None and not refined:
            refined = True
            candidates += refine(candidates, index)
            continue
        known = _means(scores)
        for count, seeds in choice.rounds if index is not None else ():
            best = _best(known, count)
            if missing := [run for i in best for seed in seeds if (run := trial(candidates[i], seed, choice)) not in results]:
                return missing
            for i in best:
                scores[i] += _scores(candidates[i], seeds, choice, results)
            known = [mean if i in best else math.nan for i, mean in enumerate(_means(scores))]
            index = _pick(candidates, known, choice)
        if choice.rounds and index is not None and (more := extend(cell.candidates, candidates, index, choice.extend)):
            candidates += more
            continue
        limit = choice.extend and " after the most extensions allowed"
        ends = edges(candidates, index) if index is not None else ()
        return Selection(index, tuple(scores), tuple(f"{end}{limit or ''}" for end in ends), candidates)


def _scores(run: Run, seeds: Sequence[int], choice: Choice, results: Mapping[Run, Scored]) -> tuple[float, ...]:
    return tuple(_score(results[trial(run, seed, choice)], choice) for seed in seeds)


def _score(result: Scored, choice: Choice) -> float:
    if isinstance(result, RecordedScore):
        return result.score
    if result.status != "done":
        return math.nan
    if choice.on_test:
        return 100 * result.average
    if result.held_out is None:
        raise ValueError(f"{result.run.key} has no held-out accuracy: it was recorded by an older version. Train it again with --force")
    return 100 * float(result.held_out[-1].mean())


def _means(scores: Sequence[tuple[float, ...]]) -> list[float]:
    """Return the mean score of each candidate: NaN where a seed failed, so that such a candidate is never chosen."""
    return [float(np.mean(row)) for row in scores]


def _best(means: Sequence[float], count: int) -> list[int]:
    """Return the numbers of the best `count` candidates, best first; of equals the first."""
    known = [i for i, mean in enumerate(means) if not math.isnan(mean)]
    return sorted(known, key=lambda i: -means[i])[:count]


def _pick(candidates: Sequence[Run], means: Sequence[float], choice: Choice) -> int | None:
    return _rule(candidates, means, choice) if choice.by.startswith("rule") else next(iter(_best(means, 1)), None)


def _rule(candidates: Sequence[Run], means: Sequence[float], choice: Choice) -> int | None:
    """Return the largest (or smallest) strength that keeps the unregularised accuracy on the first task; the weakest if none does."""
    reference = next((m for run, m in zip(candidates, means, strict=True) if not run.sparsify.is_on), math.nan)
    if math.isnan(reference) and any(not run.sparsify.is_on for run in candidates):
        raise ValueError("the rule of thumb compares with training without a sparsifier, which failed; try a smaller learning rate")
    if math.isnan(reference):
        raise ValueError("the rule of thumb compares with no regularisation; give one candidate the sparsifier 'none'")
    inhibited = [i for i, run in enumerate(candidates) if run.sparsify.is_on and not math.isnan(means[i])]
    inhibited.sort(key=lambda i: candidates[i].sparsify.fixed_strength)
    kept = [i for i in inhibited if means[i] >= reference - choice.tolerance]
    if not kept:
        return inhibited[0] if inhibited else None
    return kept[-1] if choice.by == "rule-largest" else kept[0]
