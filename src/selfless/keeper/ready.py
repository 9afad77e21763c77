"""λ Σ_l R of an ordinary training step, prepared once a task: what the general way looks up in every step is known.

An ordinary step has one forward pass, one sparsifier with a pair form and a number as its strength, and no other term in the loss. Layers
of the same shape are computed together. Every other step takes the general way in `selfless.keeper.keeper`; the result is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfless.functional.gaussian import is_ordinary
from selfless.functional.pairs import Operands, StackedForm
from selfless.keeper.inhibition import as_leaf_sum
from selfless.keeper.part import Part
from selfless.preserve.capabilities import Anchored, Distils, Gated, Observes, Replays

if TYPE_CHECKING:
    from selfless.keeper.keeper import Keeper


class Ready:
    """The layers of a task in groups of one width, and S of each."""

    def __init__(self, keeper: Keeper, strength: float, layers: Mapping[str, tuple[Tensor, Operands]]) -> None:
        self._like = {name: (h.shape, h.dtype, h.device) for name, (h, _) in layers.items()}
        groups: dict[object, list[str]] = {}
        for name, (h, (a, _)) in layers.items():
            groups.setdefault((h.shape, a.shape, h.dtype, h.device), []).append(name)
        self._groups = [
            (names, StackedForm([layers[name][1] for name in names], strength, len(layers[names[0]][0]))) for names in groups.values()
        ]
        self._case = (keeper.alpha, keeper.collector.taps, keeper.tasks, keeper.implicit)
        self._alpha = [(name, a, a._version) for name, a in keeper.alpha.items()]

    def read(self, keeper: Keeper) -> dict[str, Tensor] | None:
        """Return the activations since the last call, if this step is as the one before; else None, and they stay where they are."""
        collector, (alpha, taps, tasks, implicit) = keeper.collector, self._case
        if len(collector.passes) != len(self._like) or not torch.is_grad_enabled() or not keeper.model.training:
            return None
        if keeper.alpha is not alpha or collector.taps is not taps or keeper.tasks != tasks or keeper.implicit is not implicit:
            return None
        h, hs = None, dict[str, Tensor]()
        for name, parts in collector.passes.items():
            h = _plain(parts)
            if h is None or self._like.get(name) != (h.shape, h.dtype, h.device):
                return None
            hs[name] = h
        if h is None or not is_ordinary(h) or torch.is_autocast_enabled(h.device.type) or not keeper.ranks.is_alone:
            return None
        if len(alpha) != len(self._alpha):
            return None
        for name, a, version in self._alpha:
            if alpha.get(name) is not a or a._version != version:
                return None
        collector.drop()
        return hs

    def cost(self, hs: Mapping[str, Tensor], keeper: Keeper) -> Tensor:
        """Return λ Σ_l R, and log its parts."""
        log, total = keeper.step_log, None
        log.begin()
        for names, form in self._groups:
            cost, twice, h = form.sizes([hs[name] for name in names])
            log.add("inhibition", twice, 0.5, names)
            log.add_activity(names, h)
            total = cost if total is None else total + cost
        assert total is not None
        if keeper.check_finite:
            keeper.check_penalty(hs, total)
        return as_leaf_sum(total, total, is_hooked=False)


def _plain(parts: Sequence[tuple[Tensor, Any, Any]]) -> Tensor | None:
    """Return the activations of a layer if it had one pass and they are (samples, neurons) as they are; else None."""
    h, activation, counted = parts[0]
    is_plain = len(parts) == 1 and activation is None and counted is None and type(h) is Tensor and h.dim() == 2
    return h if is_plain else None


def prepare(keeper: Keeper, found: Mapping[str, Tensor], passes: Mapping[str, Sequence[tuple[Tensor, Any, Any]]]) -> Ready | None:
    """Return what the next steps need if they are ordinary ones; `found` are the activations of this step, from its `passes`."""
    if any(_plain(parts) is None for parts in passes.values()):
        return None
    terms = [(number, term) for number, term in enumerate(keeper.sparsifiers.terms) if term.is_on]
    if len(terms) != 1 or not found or not all(_adds_nothing(part, keeper.tasks, keeper.implicit) for part in keeper.parts):
        return None
    (number, term), layers = terms[0], dict[str, tuple[Tensor, Operands]]()
    strength = keeper.sparsifiers.strength(number)
    if isinstance(strength, Tensor) or term.reads != "activations" or not keeper.ranks.is_alone or set(found) != set(keeper.taps):
        return None
    for name, h in found.items():
        form = term.pair_form(h.shape[1], keeper.alpha.get(name))
        operands = form.operands(h) if form is not None and is_ordinary(h) and h.dtype in (torch.float32, torch.float64) else None
        if operands is None:
            return None
        layers[name] = h, operands
    return Ready(keeper, strength, layers)


def _adds_nothing(part: Part, tasks: int, implicit: bool) -> bool:
    """Return True if the loss of this task has no term of this preserver, and nothing follows its backward pass."""
    return part.path is None and part.gates is None and not needs_penalty(part, tasks, implicit)


def needs_penalty(part: Part, tasks: int, implicit: bool) -> bool:
    """Return True if the loss of this task must contain keeper.penalty() because of this preserver."""
    term = part.term
    is_anchored = implicit and isinstance(term, Anchored)
    has_cost = bool(tasks) and (isinstance(term, Distils | Replays) or (term.penalises and not is_anchored))
    return part.is_on and (has_cost or isinstance(term, Observes | Gated))
