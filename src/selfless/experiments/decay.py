"""Choose λ_Ω: the strength of a preserver that is best on the tasks seen so far, or the largest that costs little beside it.

    λ_Ω = max {λ : s(λ) ≥ max_λ' s(λ') − drop},   s(λ): held-out accuracy after the newest task, mean over all tasks seen so far

With drop = 0 it is the best one, the default. De Lange et al. (*A continual learning survey*, 2019) start strong and compare the newest
task alone with training without a preserver. Where every strength costs more than their margin, that chooses none at all: on CIFAR-100 it
ended 22 points below the best. A drop of half a point chose anchors that were too strong for later tasks (docs/strengths.md). A fleet
trains all strengths at once; if the best one stands at an end of them, the next one there is trained too. No test data are used.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from selfless.experiments.grids import beyond
from selfless.metrics import strongest_that_keeps
from selfless.spec import Result, Run
from selfless.terms import Term

EXTEND = 2  # strengths that may be added at each end of a grid


@dataclass(frozen=True)
class Decay:
    """The candidates by strength (the first is 0), their held-out accuracies by seed in percent, and the chosen one."""

    candidates: tuple[Run, ...]
    scores: tuple[tuple[float, ...], ...]
    index: int | None

    @property
    def means(self) -> dict[float, float]:
        """The mean accuracy of each strength."""
        return {run.preserve.fixed_strength: float(np.mean(row)) for run, row in zip(self.candidates, self.scores, strict=True)}


def check_tunable(preserve: Term, strengths: Sequence[float]) -> None:
    """Raise ValueError for a preserver whose strength is a share or a threshold: a larger one does not hold more.

    Raise it, too, if the preserver refuses one of these strengths, before anything is trained.
    """
    if preserve.name == "none":
        raise ValueError("tune cannot choose the strength of none; leave the preserver out to choose that of the sparsifier alone")
    if odd := [part.name for part in preserve.parts if not getattr(part, "is_weight", True)]:
        raise ValueError(
            f"tune cannot choose the strength of {odd[0]}: a larger one does not keep more of the old tasks. It tunes mas, ewc, si, lwf "
            "and others with a penalty; for the rest see the tables in docs/strengths.md"
        )
    for strength in strengths:
        preserve.with_strength(strength)


def decay_runs(base: Run, strengths: Sequence[float], tasks: int, seeds: Sequence[int], held_out: float = 0.1) -> dict[Run, list[Run]]:
    """Return {candidate: its runs by seed}: the preserver of `base` at 0 and at each strength, on the first `tasks` tasks."""
    if tasks < 2:
        raise ValueError(f"{tasks} task is seen, but the strength of a preserver shows on the second task; use two or more")
    found = {}
    for strength in (0.0, *sorted(strengths)):
        one = dataclasses.replace(base, preserve=base.preserve.with_strength(strength), tasks=tasks, held_out=max(base.held_out, held_out))
        found[one] = [dataclasses.replace(one, seed=seed) for seed in seeds]
    return found


def choose_decay(trials: Mapping[Run, Sequence[Run]], results: Mapping[Run, Result], drop: float, given: Sequence[float] = ()) -> Decay:
    """Return the largest strength whose held-out accuracy, averaged over the tasks seen, is within `drop` points of the best.

    given   the grid as it was written, if others were added; empty: all of them
    """

    def score(run: Run) -> float:
        held_out = results[run].held_out
        return 100 * float(held_out[-1].mean()) if results[run].status == "done" and held_out is not None else float("nan")

    scores = tuple(tuple(score(run) for run in runs) for runs in trials.values())
    found = Decay(tuple(trials), scores, None)
    return dataclasses.replace(found, index=choose_strength(found.means, drop, given))


def choose_strength(scores: Mapping[float, float], drop: float, given: Sequence[float] = ()) -> int | None:
    """Return the number of the largest strength whose score is within `drop` of the best; None if all failed.

    given   the grid as it was written, if others were added. One above it counts only if its score is above those of all weaker ones:
            where an anchor holds everything, a hundred times its strength has the same score, and shows its price in later tasks.
    """
    largest = max(given, default=math.inf)

    def counts(strength: float) -> bool:
        return strength <= largest or scores[strength] > max(_finite(scores, [s for s in scores if s < strength]), default=-math.inf)

    return strongest_that_keeps(list(scores), [score if counts(s) else math.nan for s, score in scores.items()], None, drop)


def next_strength(given: Sequence[float], scores: Mapping[float, float], most: int) -> float | None:
    """Return the strength to try next because the best one stands alone at an end of those tried; None if it is inside, or at the limit.

    given   the grid as it was written: at most `most` strengths are added at each end of it
    """
    inside, values = _positive(given), _positive(list(scores))
    highest = max(_finite(scores, list(scores)), default=math.nan)
    best = [strength for strength, score in scores.items() if score == highest]
    if len(inside) < 2 or len(best) != 1 or values[0] < best[0] < values[-1]:
        return None
    up = best[0] == values[-1]  # no preserver at all, 0, is below the grid
    outside = sum(value > inside[-1] if up else value < inside[0] for value in values)
    new = beyond(values, up)
    return new if outside < most and 0 < new < math.inf else None


def _positive(strengths: Sequence[float]) -> list[float]:
    return sorted({strength for strength in strengths if strength > 0})


def _finite(scores: Mapping[float, float], of: Sequence[float]) -> list[float]:
    return [scores[strength] for strength in of if not math.isnan(scores[strength])]
