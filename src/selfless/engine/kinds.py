"""Members of one fleet whose preservers consolidate in different ways, such as MAS and EWC. Their steps are the same (`step_kind`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import TypeVar

import torch

from selfless.engine.stack import Tensors
from selfless.preserve import Preserver, State
from selfless.preserve.base import consolidated
from selfless.terms import Term

Kind = TypeVar("Kind", bound=Term)


def kinds_of(terms: Sequence[Kind]) -> list[tuple[Kind, slice]]:
    """Return the preservers, or sums of them, that differ in more than their strength, each with its members, which are neighbours."""
    found = [list(group) for _, group in groupby(range(len(terms)), key=lambda m: [part.without_strength for part in terms[m].parts])]
    return [(terms[group[0]], slice(group[0], group[-1] + 1)) for group in found]


def take(tensors: Tensors, members: slice) -> Tensors:
    """Return stacked tensors of some members."""
    return {name: t[members] for name, t in tensors.items()}


def join(parts: Sequence[Tensors]) -> Tensors:
    """Concatenate the stacked tensors of each group of members into those of all members."""
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def consolidate(kinds: Sequence[tuple[Preserver, slice]], state: State, parameters: Tensors, omega: Tensors) -> State:
    """Return the state of all members after a task, for each kind by its own preserver."""
    states = []
    for term, members in kinds:
        own = {group: take(tensors, members) for group, tensors in state.items()}
        states.append(torch.func.vmap(partial(consolidated, term))(own, take(parameters, members), take(omega, members)))
    return {group: join([new[group] for new in states]) for group in states[0]}
