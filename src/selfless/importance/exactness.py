"""Checks that a closed form is exact for a model. Each is made once for graphs of a kind, on the first batch that allows it, and in every
batch where the data decide which rows belong to a sample (`Graph.kind`).

Multiplying L_m by w_m must multiply row m of δ by w_m, and nothing else: then row m of δ depends on sample m alone. For operations, this
also finds the axis of samples: attention works on (positions, samples, features), and some layers on rows of all samples. Then Σ_m g_m of
an operation is compared with the gradient of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from selfless.functional.shapes import wide
from selfless.importance.fallback import ROUNDING, is_same
from selfless.importance.graph import Graph, Use, shape_of
from selfless.importance.uses import NOTHING, gradient_sum, layouts, layouts_of, part_of

Layouts = dict[str, list[str]]  # parameter → the layout of each of its uses


@dataclass
class Exactness:
    """What was found out about the modules and operations of one model."""

    parameters: Mapping[str, Tensor]  # of the model, by name
    memory: int
    modules: dict[str, bool] = field(default_factory=dict)  # module → its closed form is exact
    layouts: dict[tuple[str, int, str, int], str] = field(default_factory=dict)  # (parameter, use, operation, argument) → samples
    refused: set[str] = field(default_factory=set)  # parameters whose uses have no exact closed form
    is_by_data: bool = False  # True if the data of this batch decide which rows belong to a sample
    # kind of graph → `modules` and `layouts` of it
    _kinds: dict[Any, tuple[dict[str, bool], dict[tuple[str, int, str, int], str]]] = field(default_factory=dict)

    def begin(self, graph: Graph, count: int) -> None:
        """Recall what was found out about graphs of this kind."""
        kind = graph.kind(count)
        self.is_by_data = kind is None
        self.modules, self.layouts = ({}, {}) if kind is None else self._kinds.setdefault(kind, ({}, {}))

    def exact_modules(self, values: Tensor, edges: Mapping[str, GradientEdge]) -> set[str]:
        """Return the modules whose closed form is exact."""
        unknown = {name: edge for name, edge in edges.items() if name not in self.modules}
        if unknown and len(values) > 1:
            deltas, weighted_deltas, w = _two_gradients(values, list(unknown.values()))
            for name, delta, weighted in zip(unknown, deltas, weighted_deltas, strict=True):
                if delta is not None and weighted is not None and len(delta) == len(w) and 0 < _largest(delta) < math.inf:
                    self.modules[name] = _is_weighted(delta, weighted, w)
                elif delta is not None and len(delta) != len(w):
                    self.modules[name] = False
        return {name for name in edges if self.modules.get(name, True)}

    def exact_uses(self, values: Tensor, uses: Mapping[str, Sequence[Use]]) -> Layouts:
        """Return the layouts of the parameters all of whose uses have an exact closed form."""
        uses = {name: every for name, every in uses.items() if name not in self.refused}
        known = {name: self._known(name, every, len(values)) for name, every in uses.items()}
        unknown = {name: uses[name] for name, found in known.items() if found is None}
        new = self._find_layouts(values, unknown) if unknown else {}
        return {name: found for name, found in known.items() if found is not None} | new

    def _known(self, name: str, uses: Sequence[Use], count: int) -> list[str] | None:
        """Return the layout of each use of a parameter; None if it must be found first."""
        found = []
        for number, use in enumerate(uses):
            shape = shape_of(use.output)
            layout = self.layouts.get((name, number, *use.key))
            if shape is None or layout is None or layout not in layouts(shape, count):
                return None
            found.append(layout)
        return found

    def _find_layouts(self, values: Tensor, uses: Mapping[str, Sequence[Use]]) -> Layouts:
        """Return the layout of every use, found by weighting the samples; refuse parameters whose Σ_m g_m is not the gradient."""
        count, every = len(values), [(name, number, use) for name, found in uses.items() for number, use in enumerate(found)]
        parameters = [self.parameters[name] for name in uses]
        deltas, weighted_deltas, w = _two_gradients(values, [use.edge for _, _, use in every])
        gradients = torch.autograd.grad(values.sum(), parameters, retain_graph=True, allow_unused=True)
        parts: dict[str, list[tuple[Use, Tensor, str]]] = {name: [] for name in uses}
        for (name, number, use), delta, weighted in zip(every, deltas, weighted_deltas, strict=True):
            if delta is None or weighted is None:
                self.refused.add(name)
                continue
            known = self.layouts.get((name, number, *use.key))
            if known is None and count > 1 and _largest(delta) == 0:
                parts[name].append((use, delta, NOTHING))
                continue
            ways = layouts_of(use, delta.shape, count)
            fits = [n for n, lay in ways.items() if count == 1 or _is_weighted(lay(delta), lay(weighted), w)]
            if not fits or (known is not None and known not in fits):
                self.refused.add(name)
                continue
            parts[name].append((use, delta, known or fits[0]))
        result: Layouts = {}
        for (name, found), gradient in zip(parts.items(), gradients, strict=True):
            if name in self.refused or gradient is None or not self._is_sum(name, found, values, gradient):
                self.refused.add(name)
                continue
            result[name] = [layout for _, _, layout in found]
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            if count > 1 and bool(dense.any()):  # one sample, or a gradient of zero, fits every layout
                self.layouts |= {(name, number, *use.key): layout for number, (use, _, layout) in enumerate(found) if layout != NOTHING}
        return result

    def _is_sum(self, name: str, found: Sequence[tuple[Use, Tensor, str]], values: Tensor, gradient: Tensor) -> bool:
        """Return True if Σ_m g_m is the gradient of the batch."""
        shape, count = self.parameters[name].shape, len(values)
        parts = [(use, part_of(use, shape, delta, layout, count, None)) for use, delta, layout in found]
        known = [(use, part) for use, part in parts if part is not None]
        if len(known) < len(parts):
            return False
        gradient = wide(gradient.to_dense() if gradient.is_sparse else gradient)
        if not bool(torch.isfinite(gradient).all()):
            return True  # reported later, with the name of the parameter
        return is_same(gradient_sum(known, count, self.memory), gradient, values, self.parameters[name])


def with_samples_second(values: Tensor, edges: Mapping[int, tuple[GradientEdge, int]]) -> set[int]:
    """Return the numbers of those δ that have the samples on the second axis, without counting the axis of neurons.

    edges   number → (edge, axis of neurons)
    """
    deltas, weighted, w = _two_gradients(values, [edge for edge, _ in edges.values()])
    found = set()
    for (i, (_, axis)), *pair in zip(edges.items(), deltas, weighted, strict=True):
        moved = [None if g is None else g.movedim(axis, -1) for g in pair]
        first, second = moved
        if first is not None and second is not None and not _is_weighted(first, second, w):
            found |= {i} if _is_weighted(first.movedim(1, 0), second.movedim(1, 0), w) else set()
    return found


def _two_gradients(values: Tensor, edges: list[GradientEdge]) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None], Tensor]:
    """Return δ of Σ_m L_m, δ of Σ_m w_m L_m, and the weights w."""
    w = torch.linspace(0.5, 1.5, len(values), device=values.device, dtype=values.dtype)
    deltas = torch.autograd.grad(values.sum(), edges, retain_graph=True, allow_unused=True)
    return deltas, torch.autograd.grad((w * values).sum(), edges, retain_graph=True, allow_unused=True), w


def _is_weighted(delta: Tensor, weighted: Tensor, w: Tensor) -> bool:
    """Return True if row m of `weighted` is w_m times row m of δ."""
    gap = torch.addcmul(weighted, delta, w.to(delta.dtype).view(-1, *[1] * (delta.dim() - 1)), value=-1)
    return _largest(gap) <= ROUNDING[delta.dtype] * _largest(delta)


def _largest(x: Tensor) -> float:
    """max |x|, without a copy of x; 0 if x is empty, as where no sample reached an expert."""
    if not x.numel():
        return 0.0
    lowest, highest = torch.aminmax(x)
    return float(torch.maximum(-lowest, highest))
