"""Consolidate a state piece by piece, in place, so that the end of a task needs no second copy of it.

A preserver says in `splits` how its `consolidate` may be called. With "entries" each entry of a parameter is treated alone: pieces of a
flat view serve, and their results are written into the stored tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from selfless.functional.shapes import is_finite
from selfless.keeper.storage import Storage
from selfless.preserve import Preserver, State
from selfless.preserve.base import consolidated

PIECE = {"cpu": 2**16, "other": 2**24}  # entries at a time: small enough for a cache, large enough for a GPU

Piece = slice | None  # None: the whole parameter
Tensors = Mapping[str, Tensor]


def pieces_of(*tensors: Tensor, size: int | None = None) -> list[Piece]:
    """Return the pieces of some tensors of the same shape: slices of their flat views, or [None] where they are small or not contiguous."""
    first, size = tensors[0], piece_size(tensors[0]) if size is None else size
    if first.numel() <= size or not all(t.is_contiguous() and t.shape == first.shape for t in tensors):
        return [None]
    return [slice(start, min(start + size, first.numel())) for start in range(0, first.numel(), size)]


def is_large(*tensors: Tensor) -> bool:
    """Return True if these tensors have more entries together than a piece may have."""
    return sum(t.numel() for t in tensors) > piece_size(tensors[0])


def piece_size(tensor: Tensor) -> int:
    """Return how many entries of this tensor a piece has."""
    return PIECE.get(tensor.device.type, PIECE["other"])


def piece_of(tensor: Tensor, piece: Piece) -> Tensor:
    """Return a piece of a tensor, as a view."""
    return tensor if piece is None else tensor.view(-1)[piece]


def check_consolidation(
    term: Preserver, state: State, parameters: Tensors, omega: Tensors, storage: Storage, size: int | None = None
) -> None:
    """Raise ValueError if the importances after this task would be negative or not finite; nothing changes."""
    for name, _, new in _consolidate(term, state, parameters, dict(omega), storage, size, consume=False):
        for key, value in (term.importance(new) or {}).items():
            check_importance(name or key, value)


def check_importance(name: str, value: Tensor) -> None:
    """Raise ValueError if an importance is negative or not finite."""
    if value.device.type == "meta" or not value.numel():
        return
    if not is_finite(value):
        raise ValueError(f"the importance of {name!r} is not finite; did training diverge? Lower the learning rate or λ, or clip gradients")
    if bool(value.min() < 0):  # the anchor would push the weight away
        raise ValueError(f"the importance of {name!r} is negative; return values that are not, such as omega.abs()")


def consolidate(
    term: Preserver, state: State, parameters: Tensors, omega: dict[str, Tensor], storage: Storage, size: int | None = None
) -> State:
    """Return the state after a task, as it is stored. Tensors of `state` are reused, and `omega` is emptied on the way.

    size   the entries of a piece; None: as the device of the parameters wants it
    """
    groups = {group.name: group for group in term.groups if group.like_parameter}
    result: State = {}
    for name, piece, new in _consolidate(term, state, parameters, omega, storage, size, consume=True):
        for group, tensors in new.items():
            found = result.setdefault(group, {})
            for key, value in tensors.items():
                if key != name or group not in groups:
                    found[key] = value  # a parameter that the task did not have, or a number
                    continue
                dtype, shape = storage.dtype_for(groups[group], value, parameters[name]), parameters[name].shape
                device = storage.device or value.device
                old = found.get(key, state.get(group, {}).get(key))
                if old is None or (old.dtype, old.shape, old.device) != (dtype, shape, device):
                    old = torch.empty(shape, dtype=dtype, device=device)
                found[key] = old
                piece_of(old, piece).copy_(value)
    return storage.store(term, {g: result.get(g, {}) for g in {**state, **result}}, parameters)


def _consolidate(
    term: Preserver, state: State, parameters: Tensors, omega: dict[str, Tensor], storage: Storage, size: int | None, *, consume: bool
) -> Iterator[tuple[str | None, Piece, State]]:
    """Call `consolidate` for one piece at a time; yield (parameter, piece, its new state), and at last (None, None, all the rest).

    Entries of the state that are named after a parameter belong to it; all others (a count of tasks) are passed to every call.
    """
    shaped = {group.name for group in term.groups if group.like_parameter}
    named = {n for group in shaped for n in state.get(group, {})} | parameters.keys()
    common = {g: {n: t for n, t in ts.items() if g not in shaped and n not in named} for g, ts in state.items()}
    for name, p in parameters.items():
        own = {g: {name: ts[name]} if name in ts else {} for g, ts in state.items()}
        tensors = [own[g][name] for g in own if g in shaped and own[g]] + ([omega[name]] if name in omega else [])
        for piece in pieces_of(p, *tensors, size=size) if term.splits == "entries" else [None]:
            given = {
                g: {**common[g], **{n: storage.load(piece_of(t, piece), p.device) if g in shaped else t for n, t in ts.items()}}
                for g, ts in own.items()
            }
            new = consolidated(term, given, {name: piece_of(p, piece)}, {name: piece_of(omega[name], piece)} if name in omega else {})
            own |= {g: {name: new[g][name]} for g in new if g not in shaped and name in new[g]}  # sums over the pieces of a parameter
            yield name, piece, new
        if consume:
            omega.pop(name, None)
    device = next(iter(parameters.values())).device
    rest = {g: {n: t for n, t in ts.items() if n not in parameters} for g, ts in state.items()}
    yield None, None, consolidated(term, storage.load_state(rest, device), {}, {})
