"""Checks of a preserver's state: every group is declared, and a training step changes only groups with `changes_in_step`.

The engine writes only those groups back after a step, and a saved state is read by the declared groups. A group that is not declared would
be lost without a word, so keeper and engine check when a preserver is attached, and the engine checks what each step changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Mapping

from torch import Tensor

from selfless.importance.objectives import FunctionNorm
from selfless.preserve.base import Preserver
from selfless.preserve.capabilities import Anchored, Distils, Observes, State
from selfless.preserve.deprecated import adopt_groups

MOST_AUTO = 1e6  # a larger measured strength means that Ω is rounding errors


def check_groups(term: Preserver, state: State, parameters: Container[str]) -> None:
    """Raise ValueError unless every group of the state is declared, and a preserver that observes steps can store what it sees."""
    label = type(term).__name__
    if Observes in type(term).__mro__ and not any(group.changes_in_step for group in term.groups):
        raise ValueError(
            f"{label} observes every step, but none of its groups changes in a step; "
            f'declare the group that observe() changes: groups = (Group("path", changes_in_step=True), …)'
        )
    unknown = adopt_groups(type(term), state, parameters)
    if unknown:
        raise ValueError(
            f"the state of {label} has the group {unknown[0]!r}, which is not declared; "
            f'add Group("{unknown[0]}") to its groups, with changes_in_step=True if a training step changes it'
        )


def check_real(term: Preserver, parameters: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a complex parameter: importances and penalties are defined for real ones."""
    computes = term.measures or isinstance(term, Anchored | Distils | Observes)
    for name, p in parameters.items() if computes and term.is_on else ():
        if p.is_complex():
            raise ValueError(
                f"{name!r} is complex, and {type(term).__name__} preserves real parameters only: keep its real and imaginary part as one "
                "real parameter (torch.view_as_real, view_as_complex in forward), or leave it out with parameters="
            )


def warn_of_strength(term: Preserver, strength: float) -> None:
    """Warn of a measured strength that says that nothing was important. The likelihood of a network that is sure has no such scale."""
    if strength > MOST_AUTO and isinstance(term.objective, FunctionNorm):
        warnings.warn(
            f"the strength of {term} is {strength:.1g}, because Ω is nearly 0: no weight changes what {type(term).__name__} measures. If "
            "the model normalises its output (F.normalize), pass consolidate a forward= that returns it before that",
            stacklevel=6,
        )


def check_step(term: Preserver, function: str, before: State, after: State) -> None:
    """Raise ValueError if a function that a step calls changed a tensor of a group without `changes_in_step`."""
    stepped = {group.name for group in term.groups if group.changes_in_step}
    for group, tensors in after.items():
        old = before.get(group, {})
        if group not in stepped and (tensors.keys() != old.keys() or any(t is not old[n] for n, t in tensors.items())):
            raise ValueError(
                f"{type(term).__name__}.{function}() changes the group {group!r}, which does not change in a step by its declaration; "
                f'write Group("{group}", changes_in_step=True), and create its tensors in init()'
            )
