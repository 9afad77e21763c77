"""Checks of a preserver's state: every group is declared, and a training step changes only groups with `changes_in_step`.

The engine writes only those groups back after a step, and a saved state is read by the declared groups. A group that is not declared would
be lost without a word, so keeper and engine check when a preserver is attached, and the engine checks what each step changes.
"""

from __future__ import annotations

from collections.abc import Container

from selfless.preserve.base import Preserver
from selfless.preserve.capabilities import Observes, State
from selfless.preserve.deprecated import adopt_groups


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
