"""The laws of every method. Each has a function that raises `Broken`, with the remedy; `LAWS` says for which methods it holds."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from selfless.preserve import PRESERVERS
from selfless.preserve.capabilities import Anchored, Distils, Gated, ProjectsSteps, Replays
from selfless.sparsify import SPARSIFIERS
from selfless.terms import Term, parse
from selfless.testing import in_runs, of_preservers, of_sparsifiers
from selfless.testing.comparing import Broken


class Law(NamedTuple):
    """What a law says, which terms it holds for, and the function that tests it."""

    says: str
    holds_for: Callable[[Any], bool]
    test: Callable[[Any], None]


def is_value(term: Term) -> None:
    """A run with an equal term is the same run, so a term must be a value that nobody changes."""
    kind = type(term)
    if not (dataclasses.is_dataclass(term) and kind.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise Broken(f"{kind.__name__} is not a frozen dataclass; write @dataclass(frozen=True) above the class")
    fields = dataclasses.fields(term)
    if bare := [f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]:
        raise Broken(f"{bare[0]} has no default; give every option one, as strength: float = 0.1")
    lost = [name for name, hint in inspect.get_annotations(kind).items() if "ClassVar" not in str(hint)]
    if lost := [name for name in lost if name not in {f.name for f in fields}]:
        raise Broken(f"{lost[0]} is no option: {kind.__name__} itself is no dataclass; write @dataclass(frozen=True) above it")
    try:
        is_equal = copy.deepcopy(term) == term and hash(copy.deepcopy(term)) == hash(term)
    except TypeError:
        is_equal = False
    if not is_equal:
        raise Broken("a copy of it is not equal to it; options must be numbers, text, True, False or None, not lists")
    for strength in (math.nan, -1.0):
        try:
            dataclasses.replace(term, strength=strength)
        except ValueError:
            continue
        raise Broken(f"it takes the strength {strength}; call super().__post_init__() in your __post_init__")


def is_read_back(term: Term) -> None:
    """Records and commands hold a term as text."""
    kinds: Any = SPARSIFIERS if term.role == "sparsifier" else PRESERVERS
    found = parse(str(term), kinds, term.role)
    if found != term or repr(found) != repr(term):
        raise Broken(f"{str(term)!r} is read as {found!r}; options must be numbers, text, True, False or None")


def _is_importable(term: Term) -> bool:
    """Return False for a class of a notebook or inside a function, which no other process can import."""
    return not any(type(part).__module__ == "__main__" or "<locals>" in type(part).__qualname__ for part in term.parts)


def _is_single(term: Term) -> bool:
    return len(term.parts) == 1


def _is_formula(term: Term) -> bool:
    """Return True for a single sparsifier."""
    return term.role == "sparsifier" and term.name != "none" and _is_single(term)


def _reads_activations(kind: Any) -> bool:
    return _is_formula(kind) and kind.reads == "activations"


def _is_mean(kind: Any) -> bool:
    return bool(kind.is_mean)


def _decorrelates(kind: Any) -> bool:
    return bool(kind.decorrelates)


def _holds_parameters(term: Any) -> bool:
    """Return whether every part of a method has its least cost at θ*."""
    return all(isinstance(part, Anchored | Distils) and not isinstance(part, Gated | Replays) for part in term.parts)


def _preserves(term: Any) -> bool:
    return bool(term.role == "preserver")


def _is_stable(term: Any) -> bool:
    """Return whether a preserver promises to be stable at any strength: by its implicit anchor, or by its damping."""
    return _is_single(term) and not term.is_auto and (isinstance(term, Anchored) or (isinstance(term, Distils) and _damped(term)))


def _damped(term: Any) -> bool:
    return any(group.name == "curvature" for group in term.groups) and getattr(term, "damped", True)


def _draws_alike(term: Any) -> bool:
    """Return False for a method that draws other random numbers in a loop than in a run, or other samples of a task."""
    drawing = [part for part in term.parts if isinstance(part, Replays | ProjectsSteps)]
    return all("samples" in part.__dict__ for part in drawing) and _shares_fleets(term)


def _shares_fleets(term: Any) -> bool:
    """Return False for a method that draws random numbers when a task ends: it trains without others."""
    return not any(getattr(part, "draws_randomly", False) for part in term.parts)


def _all_of(*conditions: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda term: all(condition(term) for condition in conditions)


LAWS = (
    Law("it is a frozen value, and refuses a strength that is none", _is_single, is_value),
    Law("its text form is read back as the same method", lambda term: term.name != "none" and _is_importable(term), is_read_back),
    Law("its penalty is one finite number with a finite gradient", _is_formula, of_sparsifiers.is_one_number),
    Law("its gradient is finite where all neurons are silent", _is_formula, of_sparsifiers.is_finite_at_rest),
    Law("a step against its gradient lowers its penalty", _is_formula, of_sparsifiers.falls_against_its_gradient),
    Law(
        "its penalty does not depend on the size of a batch",
        _reads_activations,
        of_sparsifiers.does_not_grow_with_the_batch,
    ),
    Law("its cost grows with its strength, and strength 0 is off", _is_formula, of_sparsifiers.scales_with_its_strength),
    Law("its penalty can be mapped over the members of a fleet", _is_formula, of_sparsifiers.maps_over_members),
    Law("it is a mean over samples if it says so", _all_of(_is_formula, _is_mean), of_sparsifiers.is_the_mean_it_declares),
    Law("its pair form has the gradient of its penalty", _is_formula, of_sparsifiers.has_the_gradient_it_declares),
    Law("its covariance form is its penalty", _all_of(_is_formula, _decorrelates), of_sparsifiers.has_the_covariance_it_declares),
    Law("its functions are pure, and what it declares is true", _preserves, of_preservers.has_pure_functions),
    Law("it pulls nowhere where a task ended", _holds_parameters, of_preservers.pulls_nowhere_where_a_task_ended),
    Law("nothing diverges at any strength", _is_stable, of_preservers.stays_finite_at_any_strength),
    Law("it holds convolutions too, and its state has the precision of the network", _preserves, of_preservers.keeps_the_precision),
    Law(
        "it can be consolidated in pieces if it says so",
        lambda term: _preserves(term) and any(part.splits != "whole" for part in term.parts),
        of_preservers.consolidates_in_pieces,
    ),
    Law("it goes on from a saved state", _preserves, of_preservers.goes_on_from_a_saved_state),
    Law("a run trains it as a loop does", _draws_alike, in_runs.acts_alike_in_loops_and_runs),
    Law("a fleet trains it as single runs do", _shares_fleets, in_runs.acts_alike_in_fleets),
)
