"""The laws of a method in runs: a run trains it as a loop does, a fleet as single runs do."""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from typing import Any

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


def acts_alike_in_loops_and_runs(term: Term) -> None:
    """`attach` in a plain loop and a run of the engine end at the same parameters, Ω, α and accuracies."""
    run, effect = visible(reading_all(term))
    made, learner = train_in_loop(run), Learner([run])
    (result,) = learner.learn()
    where = "of a run, beside that of a loop"
    for name, p in made.model.named_parameters():
        same(f"{name} {where}", learner.fleet.params[name][0], p, effect / 100)
    for state, stacked in zip(made.keeper.states, learner.fleet.states, strict=True):
        for name, omega in state.get("omega", {}).items():
            same(f"Ω of {name} {where}", stacked["omega"][name][0], omega)
    for name, alpha in made.keeper.alpha.items():
        same(f"α of {name} {where}", learner.fleet.alpha[name][0], alpha)
    same(f"the accuracy {where}", torch.tensor(result.accuracy), torch.tensor(made.accuracy), IMAGE)


def acts_alike_in_fleets(term: Any) -> None:
    """Runs end alike, alone and in a fleet of three; they differ in their seeds and, if they may, in their strengths."""
    first, effect = visible(term)
    term = first.sparsify if term.role == "sparsifier" else first.preserve
    one_strength = any(getattr(part, "same_strength", False) for part in term.parts)
    shares = [1.0] * 3 if one_strength or term.is_auto else [1.0, 0.5, 0.0]
    runs = [run_of(at_strength(term, share * term.fixed_strength) if share < 1 else term, seed=seed) for seed, share in enumerate(shares)]
    fleet = Learner(runs)
    together = fleet.learn()
    for member, run in enumerate(runs):
        alone = Learner([run])
        (result,) = alone.learn()
        where = f"of member {member + 1} of a fleet, beside the same run alone"
        for name, p in alone.fleet.params.items():
            same(f"{name} {where}", fleet.fleet.params[name][member], p[0], effect / 100)
        for state, stacked in zip(alone.fleet.states, fleet.fleet.states, strict=True):
            for name, omega in state.get("omega", {}).items():
                same(f"Ω of {name} {where}", stacked["omega"][name][member], omega[0])
        same(f"the accuracy {where}", torch.tensor(together[member].accuracy), torch.tensor(result.accuracy), IMAGE)


@lru_cache(maxsize=4)
def visible(term: Any) -> tuple[Run, float]:
    """Return a run in which the method moves some parameter by `SEEN` or more, and by how much; at another strength if need be.

    Raise Broken if the parameters do not stay finite, or if no strength has an effect.
    """
    term = at_strength(term, LARGE) if term.fixed_strength > LARGE else term
    plain, strength = parameters_without(_field(term)), term.fixed_strength
    raised = [strength * 10.0**k for k in range(1, 13) if strength * 10.0**k <= MOST]
    found: tuple[Run, float] | None = None
    for one in [strength, *raised, *(strength / 10.0**k for k in range(1, 5))] if strength else [strength]:
        run = run_of(term if one == strength else at_strength(term, one))
        learner = Learner([run])
        learner.learn()
        moved = max((p - plain[n]).abs().max().item() for n, p in learner.fleet.params.items())
        if math.isfinite(moved) and (found is None or moved > found[1]):
            found = run, moved
        if moved >= SEEN or term.is_auto:
            break
    if found is None:
        raise Broken("parameters are not finite after three small tasks; check it at a smaller strength")
    if strength and not found[1] and term.name != "none" and not any(isinstance(part, Evaluates) for part in term.parts):
        raise Broken(
            f"at no strength from {strength / 1e4:g} to {MOST:g} a parameter differs from training without it. Has penalty() a gradient? "
            "If it needs Ω measured on the data, write measures: ClassVar[bool] = True"
        )
    return found


@lru_cache(maxsize=2)
def parameters_without(field: str) -> dict[str, Tensor]:
    """Return the parameters at the end of the small run without a preserver or without a sparsifier."""
    learner = Learner([small_run(**{field: "none"})])
    learner.learn()
    return {name: p.detach() for name, p in learner.fleet.params.items()}


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
