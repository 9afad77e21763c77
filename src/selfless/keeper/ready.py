"""λ Σ_l R of an ordinary training step, prepared once a task: what the general way looks up in every step is known.

An ordinary step has one forward pass, chosen layers whose activations are (M, N), one sparsifier with a pair form and a number as its
strength, and no other term in the loss. Every other step takes the general way in `selfless.keeper.keeper`; the result is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfless.functional.gaussian import is_ordinary
from selfless.functional.pairs import Operands, PairForm, halves, prepared_sizes

if TYPE_CHECKING:
    from selfless.keeper.keeper import Keeper


class Ready:
    """The layers of a task, the S of each, and λ."""

    def __init__(self, keeper: Keeper, strength: float, layers: Mapping[str, tuple[Tensor, PairForm, Operands]]) -> None:
        self._strength, self._names = strength, list(layers)
        self._forms, self._operands = tuple(form for _, form, _ in layers.values()), [operands for _, _, operands in layers.values()]
        self._like = [(name, h.shape[1], h.dtype, h.device) for name, (h, _, _) in layers.items()]
        self._halves = halves([h for h, _, _ in layers.values()])
        self._alpha = [(a, a._version) for a in keeper.alpha.values()]
        self._case = (keeper.alpha, keeper.collector.taps, keeper.tasks, keeper.implicit)

    def read(self, keeper: Keeper) -> list[Tensor] | None:
        """Return the activations since the last call, if this step is as the one before; else None, and they stay where they are."""
        passes, (alpha, taps, tasks, implicit) = keeper.collector.passes, self._case
        if not keeper.model.training or not torch.is_grad_enabled() or len(passes) != len(self._like):
            return None
        if keeper.alpha is not alpha or keeper.collector.taps is not taps or keeper.tasks != tasks or keeper.implicit is not implicit:
            return None
        if not keeper.ranks.is_alone or any(a._version != version for a, version in self._alpha):
            return None
        hs = []
        for (name, width, dtype, device), (found, parts) in zip(self._like, passes.items(), strict=True):
            h, activation, counted = parts[0]
            if name != found or len(parts) > 1 or activation is not None or counted is not None or type(h) is not Tensor:
                return None
            if h.dim() != 2 or h.shape[1] != width or h.dtype is not dtype or h.device != device:
                return None
            hs.append(h)
        if not is_ordinary(hs[0]) or torch.is_autocast_enabled(hs[0].device.type):
            return None
        keeper.collector.drop()
        return hs

    def cost(self, hs: list[Tensor], keeper: Keeper) -> Tensor:
        """Return λ Σ_l R, and log its parts."""
        log = keeper.step_log
        log.begin()
        cost, twice = prepared_sizes(self._forms, self._operands, self._strength, self._halves, hs)
        log.add("inhibition", twice, 0.5, self._names)
        for name, h in zip(self._names, hs, strict=True):
            log.add_activity(name, h)
        if keeper.check_finite:
            keeper.check_penalty(dict(zip(self._names, hs, strict=True)), cost)
        return cost


def prepare(keeper: Keeper, found: Mapping[str, Tensor]) -> Ready | None:
    """Return what the next steps need if they are ordinary ones; `found` are the activations of this step."""
    terms = [(number, term) for number, term in enumerate(keeper.sparsifiers.terms) if term.is_on]
    if len(terms) != 1 or not found or not all(part.adds_nothing(keeper.tasks, keeper.implicit) for part in keeper.parts):
        return None
    (number, term), layers = terms[0], {}
    strength = keeper.sparsifiers.strength(number)
    if isinstance(strength, Tensor) or term.reads != "activations" or not keeper.ranks.is_alone or list(found) != list(keeper.collector.taps):
        return None
    for name, h in found.items():
        form = term.pair_form(h.shape[1], keeper.alpha.get(name))
        operands = form.operands(h) if form is not None and is_ordinary(h) and h.dtype in (torch.float32, torch.float64) else None
        if form is None or operands is None:
            return None
        layers[name] = h, form, operands
    return Ready(keeper, strength, layers)
