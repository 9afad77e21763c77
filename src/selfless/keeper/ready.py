"""λ Σ_l R of an ordinary training step, or its gradient, prepared once a task: what the general way looks up in every step is known.

An ordinary step has one forward pass, one sparsifier with a pair form and a number as its strength, and no other term in the loss. Layers
of the same shape are computed together; with inject=True each layer has its turn in the backward pass. Every other step takes the general
way in `selfless.keeper.keeper` and `selfless.keeper.inject`; the result is the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfless.functional.gaussian import is_ordinary
from selfless.functional.pairs import LayerForm, Operands, StackedForm
from selfless.keeper.inhibition import as_leaf_sum
from selfless.keeper.part import Part
from selfless.preserve.capabilities import Anchored, Distils, Gated, Observes, Replays
from selfless.sparsify import Sparsifier

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


class ReadyLayer:
    """A layer of a task with inject=True: adds λ ∂R/∂h to a gradient."""

    def __init__(self, keeper: Keeper, layer: str, h: Tensor, operands: Operands, strength: float) -> None:
        self._layer, self._form = layer, LayerForm(operands, strength, len(h))
        self._like, self._tasks, self._alpha = (h.shape, h.dtype, h.device), keeper.tasks, keeper.alpha.get(layer)
        self._version = 0 if self._alpha is None else self._alpha._version

    def add(self, keeper: Keeper, gradient: Tensor | None, h: Tensor) -> Tensor | None:
        """Return gradient + s · λ ∂R/∂h, and log λR; None if this is not an ordinary backward pass, or not like the one before."""
        scale, alpha = keeper.scale, keeper.alpha.get(self._layer)
        if gradient is None or type(gradient) is not Tensor or gradient.shape != h.shape or gradient.dtype != h.dtype:
            return None
        if self._like != (h.shape, h.dtype, h.device) or keeper.tasks != self._tasks or alpha is not self._alpha:
            return None
        if (alpha is not None and alpha._version != self._version) or type(scale) not in (int, float) or torch.is_grad_enabled():
            return None
        if not is_ordinary(h) or torch.is_autocast_enabled(h.device.type) or not keeper.ranks.is_alone:
            return None
        form, version = self._form, h._version
        if keeper.check_finite:
            own = form.gradient(h)
            value = form.value(h, own)
            keeper.step_log.add_layer(self._layer, h, value)
            keeper.check_penalty({self._layer: h}, value)
            return torch.add(gradient, own, alpha=scale)
        # the value is unknown if someone changes the activations before reading the log
        keeper.step_log.add_layer(self._layer, h, lambda: form.value(h) if h._version == version else h.new_full((), math.nan))
        return form.add(gradient, h, scale)


def _plain(parts: Sequence[tuple[Tensor, Any, Any]]) -> Tensor | None:
    """Return the activations of a layer if it had one pass and they are (samples, neurons) as they are; else None."""
    h, activation, counted = parts[0]
    is_plain = len(parts) == 1 and activation is None and counted is None and type(h) is Tensor and h.dim() == 2
    return h if is_plain else None


def prepare(keeper: Keeper, found: Mapping[str, Tensor], passes: Mapping[str, Sequence[tuple[Tensor, Any, Any]]]) -> Ready | None:
    """Return what the next steps need if they are ordinary ones; `found` are the activations of this step, from its `passes`."""
    if any(_plain(parts) is None for parts in passes.values()) or (only := _only_term(keeper)) is None:
        return None
    if not found or not all(_adds_nothing(part, keeper.tasks, keeper.implicit) for part in keeper.parts) or set(found) != set(keeper.taps):
        return None
    (term, strength), layers = only, dict[str, tuple[Tensor, Operands]]()
    for name, h in found.items():
        operands = _operands(keeper, term, name, h)
        if operands is None:
            return None
        layers[name] = h, operands
    return Ready(keeper, strength, layers)


def prepare_layer(keeper: Keeper, layer: str, parts: Sequence[tuple[Tensor, Any, Any]]) -> ReadyLayer | None:
    """Return what the next backward passes of a layer need if they are ordinary ones; `parts` are its forward passes in this one."""
    h, only, alpha = _plain(parts), _only_term(keeper), keeper.alpha.get(layer)
    if h is None or only is None or any(part.path is not None for part in keeper.parts) or (alpha is not None and alpha.is_inference()):
        return None
    term, strength = only
    operands = _operands(keeper, term, layer, h)
    return None if operands is None else ReadyLayer(keeper, layer, h, operands, strength)


def _only_term(keeper: Keeper) -> tuple[Sparsifier, float] | None:
    """Return the sparsifier and its strength if there is one alone that reads activations, with a number as its strength."""
    terms = [(number, term) for number, term in enumerate(keeper.sparsifiers.terms) if term.is_on]
    if len(terms) != 1 or terms[0][1].reads != "activations" or not keeper.ranks.is_alone:
        return None
    strength = keeper.sparsifiers.strength(terms[0][0])
    return None if isinstance(strength, Tensor) else (terms[0][1], strength)


def _operands(keeper: Keeper, term: Sparsifier, layer: str, h: Tensor) -> Operands | None:
    form = term.pair_form(h.shape[1], keeper.alpha.get(layer))
    return form.operands(h) if form is not None and is_ordinary(h) and h.dtype in (torch.float32, torch.float64) else None


def _adds_nothing(part: Part, tasks: int, implicit: bool) -> bool:
    """Return True if the loss of this task has no term of this preserver, and nothing follows its backward pass."""
    return part.path is None and part.gates is None and not needs_penalty(part, tasks, implicit)


def needs_penalty(part: Part, tasks: int, implicit: bool) -> bool:
    """Return True if the loss of this task must contain keeper.penalty() because of this preserver."""
    term = part.term
    is_anchored = implicit and isinstance(term, Anchored)
    has_cost = bool(tasks) and (isinstance(term, Distils | Replays) or (term.penalises and not is_anchored))
    return part.is_on and (has_cost or isinstance(term, Observes | Gated))
