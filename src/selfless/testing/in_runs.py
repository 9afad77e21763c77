"""The laws of a method in runs: a run trains it as a loop does, a fleet as single runs do."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor

from selfless.engine.learner import Learner
from selfless.preserve.capabilities import Evaluates, ProjectsSteps, Replays
from selfless.spec import Run
from selfless.terms import Term, add
from selfless.testing.comparing import ROUNDING, Broken, at_strength, same
from selfless.testing.loop import train_in_loop
from selfless.testing.small import small_run

SEEN = 100 * ROUNDING  # how far a method must move a parameter, so that its effect is compared to a hundredth
LARGE = 100.0  # a larger strength is lowered to it: there rounding alone moves parameters
MOST = 1e6  # the strength at which looking for an effect ends
ALL = 999  # more than all samples of the small tasks
IMAGE = 0.026  # one of the forty test images of a task


@dataclass(frozen=True)
class End:
    """Where a training ended: parameters, Ω by part, α, and accuracies."""

    parameters: dict[str, Tensor]
    omegas: list[dict[str, Tensor]]
    alpha: dict[str, Tensor]
    accuracy: Tensor

    @classmethod
    def of_runs(cls, *runs: Run) -> list[Self]:
        """Train runs as one fleet; return where each of them ended."""
        learner = Learner(runs)
        results, fleet = learner.learn(), learner.fleet
        return [
            cls(
                {name: p[m].detach() for name, p in fleet.params.items()},
                [{name: o[m] for name, o in state.get("omega", {}).items()} for state in fleet.states],
                {name: a[m] for name, a in fleet.alpha.items()},
                torch.tensor(results[m].accuracy),
            )
            for m in range(len(runs))
        ]

    @classmethod
    def of_loop(cls, run: Run) -> Self:
        """Train a run in a plain loop; return where it ended."""
        made = train_in_loop(run)
        parameters = {name: p.detach() for name, p in made.model.named_parameters()}
        omegas = [dict(state.get("omega", {})) for state in made.keeper.states]
        return cls(parameters, omegas, dict(made.keeper.alpha), torch.tensor(made.accuracy))

    def check_same(self, other: Self, where: str, within: float) -> None:
        """Raise Broken unless `other` ended here too; parameters may differ by `within`."""
        for name, p in other.parameters.items():
            same(f"{name} {where}", self.parameters[name], p, within)
        for omega, others in zip(self.omegas, other.omegas, strict=True):
            for name, one in others.items():
                same(f"Ω of {name} {where}", omega[name], one)
        for name, a in other.alpha.items():
            same(f"α of {name} {where}", self.alpha[name], a)
        same(f"the accuracy {where}", self.accuracy, other.accuracy, IMAGE)


def acts_alike_in_loops_and_runs(term: Term) -> None:
    """`attach` in a plain loop and a run of the engine end at the same parameters, Ω, α and accuracies."""
    run, end, effect = visible(reading_all(term))
    end.check_same(End.of_loop(run), "of a run, beside that of a loop", effect / 100)


def acts_alike_in_fleets(term: Any) -> None:
    """Runs end alike, alone and in a fleet of three; they differ in their seeds and, if they may, in their strengths."""
    first, end, effect = visible(term)
    term = getattr(first, _field(term))
    one_strength = any(getattr(part, "same_strength", False) for part in term.parts)
    terms = [term] * 2 if one_strength or term.is_auto else [at_strength(term, share * term.fixed_strength) for share in (0.5, 0.0)]
    others = [run_of(one, seed=seed) for seed, one in enumerate(terms, 1)]
    alone = [end, *(End.of_runs(run)[0] for run in others)]
    for m, member in enumerate(End.of_runs(first, *others)):
        member.check_same(alone[m], f"of member {m + 1} of a fleet, beside the same run alone", effect / 100)


@lru_cache(maxsize=4)
def visible(term: Any) -> tuple[Run, End, float]:
    """Return a run in which the method moves some parameter by `SEEN` or more, where it ends, and by how much it moves one.

    It has another strength if need be. Raise Broken if the parameters do not stay finite, or if no strength has an effect.
    """
    term = at_strength(term, LARGE) if term.fixed_strength > LARGE else term
    plain, strength = end_without(_field(term)).parameters, term.fixed_strength
    raised = [strength * 10.0**k for k in range(1, 13) if strength * 10.0**k <= MOST]
    found: tuple[Run, End, float] | None = None
    for one in [strength, *raised, *(strength / 10.0**k for k in range(1, 5))] if strength else [strength]:
        run = run_of(term if one == strength else at_strength(term, one))
        (end,) = End.of_runs(run)
        moved = max((p - plain[name]).abs().max().item() for name, p in end.parameters.items())
        if math.isfinite(moved) and (found is None or moved > found[2]):
            found = run, end, moved
        if moved >= SEEN or term.is_auto:
            break
    if found is None:
        raise Broken("parameters are not finite after three small tasks; check it at a smaller strength")
    if strength and not found[2] and term.name != "none" and not any(isinstance(part, Evaluates) for part in term.parts):
        raise Broken(
            f"at no strength from {strength / 1e4:g} to {MOST:g} a parameter differs from training without it. Has penalty() a gradient? "
            "If it needs Ω measured on the data, write measures: ClassVar[bool] = True"
        )
    return found


@lru_cache(maxsize=2)
def end_without(field: str) -> End:
    """Return where the small run ends without a preserver or without a sparsifier."""
    return End.of_runs(small_run(**{field: "none"}))[0]


def reading_all(term: Any) -> Term:
    """Return a method that draws samples of a task as one that takes all of them: loops and runs draw different ones."""
    parts = []
    for part in term.parts:
        takes = {"samples", "batch"} if isinstance(part, Replays | ProjectsSteps) else set()
        parts.append(dataclasses.replace(part, **dict.fromkeys(takes & part.__dict__.keys(), ALL)))
    found: Term = add(parts)
    return found


def run_of(term: Term, **changes: Any) -> Run:
    """Return a small run of a preserver with SLNID, or of a sparsifier with MAS."""
    return small_run(**{_field(term): term}, **changes)


def _field(term: Term) -> str:
    return "sparsify" if term.role == "sparsifier" else "preserve"
