"""Exact sums over per-sample gradients, for the price of one batch gradient.

The goal is Σ_m |g_m|ᵖ with g_m = ∂L_m/∂θ (p = 1 for MAS, p = 2 for EWC), for every parameter θ. One forward pass collects the input a of
each module. One backward pass gives δ, the gradient of the batch **sum** Σ_m L_m at the output of each module. Row m of δ depends on
sample m alone. `selfless.importance.closed` computes the sum from a and δ.

A closed form is used only after a check that it is exact: the module ran once, its weight is used once in the autograd graph, and
multiplying L_m by w_m multiplies row m of δ by w_m. All other parameters go through `selfless.importance.fallback`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from selfless.functional.shapes import wide
from selfless.importance.closed import rule_for
from selfless.importance.fallback import ROUNDING, Chunks, Fallback, weight_rows
from selfless.network.layers import Tap
from selfless.network.roles import first_tensor, neuron_axis

MEMORY = 128 * 2**20  # default for the bytes that per-sample gradients may take at a time


@dataclass
class _Call:
    """One call of a module: its input, and where the gradient at its output can be read."""

    a: Tensor
    edge: GradientEdge | None  # None if the output needs no gradient


@dataclass
class Reducer:
    """Hooks on a model that compute Σ_m |∂L_m/∂θ|ᵖ and, for the taps, Σ_m |∂L_m/∂n| from per-sample values L_m.

    Use: `with Reducer(model, taps) as r: r.listen(); out = forward(...); omega, alpha = r.reduce(values, ...)`.
    """

    model: nn.Module
    taps: Mapping[str, Tap] = field(default_factory=dict)
    memory: int = MEMORY
    wanted: bool = True  # False: measure only the taps, not the parameters
    lenient: bool = False  # leave out taps without a gradient instead of raising an error
    _calls: dict[str, list[_Call]] = field(default_factory=dict)
    _edges: dict[str, list[tuple[GradientEdge, int]]] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)
    _listening: bool = False
    _independent: dict[str, bool] = field(default_factory=dict)  # module → row m of δ depends on sample m alone (checked once)
    _fallback: Fallback = field(init=False)

    def __post_init__(self) -> None:
        self._fallback = Fallback(self.model)

    def __enter__(self) -> Reducer:
        tied = _tied_parameters(self.model)
        for name, module in self.model.named_modules():
            named = dict(module.named_parameters(recurse=False))
            is_plain = named.keys() <= {"weight", "bias"}  # pruned or re-parametrised modules have others
            is_trained = any(p.requires_grad for p in named.values()) and not any(p in tied for p in named.values())
            if self.wanted and is_plain and is_trained and rule_for(module) is not None:
                self._handles.append(module.register_forward_hook(self._collect(name), prepend=True, with_kwargs=True))
        for name, tap in self.taps.items():
            if tap.at_input:
                self._handles.append(tap.module.register_forward_pre_hook(self._tap_input(name, tap), with_kwargs=True))
                self._handles.append(tap.module.register_forward_hook(self._tap_resized(name, tap), prepend=True))
            else:
                self._handles.append(tap.module.register_forward_hook(self._tap_output(name, tap)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()

    def listen(self) -> None:
        """Forget the last forward pass and collect from the next one."""
        self.clear()
        self._listening = True

    def clear(self) -> None:
        """Forget the last forward pass."""
        self._calls, self._edges, self._listening = {}, {}, False

    def _collect(self, name: str) -> Callable[..., Tensor | None]:
        """Return a forward hook that collects the input of a module and the edge of its output."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            x = first_tensor(args, kwargs)
            if not self._listening or x is None:
                return None
            edge, result = _edge(output)
            self._calls.setdefault(name, []).append(_Call(x.detach(), edge))
            return result

        return hook

    def _tap_output(self, name: str, tap: Tap) -> Callable[..., Tensor | None]:
        """Return a forward hook for a layer whose n is the output of a module."""

        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
            if not self._listening:
                return None
            n = output if output.requires_grad else output.detach().requires_grad_()  # all layers before it are frozen
            edge, result = _edge(n)
            assert edge is not None
            self._edges.setdefault(name, []).append((edge, neuron_axis(n, tap.axis)))
            return result

        return hook

    def _tap_input(self, name: str, tap: Tap) -> Callable[..., tuple[Any, Any] | None]:
        """Return a forward pre-hook for a layer whose n is the input of an activation module."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            x = first_tensor(args, kwargs)
            if not self._listening or x is None:
                return None
            n = x if x.requires_grad else x.detach().requires_grad_()
            edge, result = _edge(n)
            assert edge is not None
            self._edges.setdefault(name, []).append((edge, neuron_axis(n, tap.axis)))
            return tuple(result if v is x else v for v in args), {k: result if v is x else v for k, v in kwargs.items()}

        return hook

    def _tap_resized(self, name: str, tap: Tap) -> Callable[..., None]:
        """Return a forward hook that moves a tap to the output of an activation that changes the number of neurons (Maxout, GLU)."""

        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            x = first_tensor(inputs, {})
            if self._listening and x is not None and output.shape != x.shape and output.requires_grad:
                self._edges[name][-1] = (get_gradient_edge(output), neuron_axis(output, tap.axis))

        return hook

    def reduce(
        self,
        values: Tensor,
        power: int,
        weights: Tensor | None = None,
        chunks: Chunks | None = None,
        retain: bool = False,
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Tensor]]:
        """Return (Σ_m w_m |∂L_m/∂θ|ᵖ by parameter, Σ_m w_m |∂L_m/∂n| by tap) for per-sample values L (M,).

        The first are pairs that are computed one by one: read them before the next forward pass.

        `chunks(names)` yields per-sample gradients {name: (m, *shape)} of parameters without a closed form.
        """
        self._stop_listening(values)
        uses = _count_uses(values) if self.wanted else {}
        exact = self._exact_calls(uses, values) if self.wanted else {}
        taps = self._tap_edges()
        edges = [call.edge for call in exact.values() if call.edge is not None] + [edge for _, edge, _ in taps]
        rest = self._other_parameters(exact, uses)
        grads = list(torch.autograd.grad(values.sum(), edges, allow_unused=True, retain_graph=retain or bool(rest))) if edges else []
        rows = None if weights is None else (weights if power == 1 else weights.sqrt())

        def pairs() -> Iterator[tuple[str, Tensor]]:
            for (name, call), delta in zip(exact.items(), grads, strict=False):
                module = self.model.get_submodule(name)
                if delta is None:
                    continue  # the module ran, but the output does not depend on it
                delta, a = wide(delta), call.a if isinstance(module, nn.Embedding) else wide(call.a)
                rule = rule_for(module)
                assert rule is not None
                for key, value in rule(module, a, weight_rows(delta, rows), power, self.memory):
                    yield f"{name}.{key}" if name else key, value
            if rest:
                yield from self._fallback.reduce(rest, values, power, rows, chunks, retain).items()

        return pairs(), self._sum_by_tap(grads[len(grads) - len(taps) :], weights)

    def neurons(self, values: Tensor, weights: Tensor | None = None, retain: bool = False) -> dict[str, Tensor]:
        """Return only Σ_m w_m |∂L_m/∂n| by tap, of the last forward pass."""
        self._stop_listening(values)
        edges = [edge for _, edge, _ in self._tap_edges()]
        grads = torch.autograd.grad(values.sum(), edges, allow_unused=True, retain_graph=retain) if edges else ()
        return self._sum_by_tap(grads, weights)

    def _stop_listening(self, values: Tensor) -> None:
        """End the collection: during backward, activation checkpointing runs the modules again."""
        self._listening = False
        if not values.requires_grad:
            raise ValueError("the output does not depend on any trainable parameter: nothing to measure. Unfreeze some parameters.")

    def _tap_edges(self) -> list[tuple[str, GradientEdge, int]]:
        """Return (name, edge, axis of the neurons) of each tap, in the order of the forward pass."""
        return [(name, edge, axis) for name, edges in self._edges.items() for edge, axis in edges]

    def _sum_by_tap(self, grads: Sequence[Tensor | None], weights: Tensor | None) -> dict[str, Tensor]:
        """Return Σ_m w_m |δ_m| by tap, averaged over positions."""
        alpha: dict[str, Tensor] = {}
        for (name, _, axis), delta in zip(self._tap_edges(), grads, strict=True):
            if delta is None and self.lenient:
                continue
            if delta is None:
                raise ValueError(f"layer {name!r} does not reach the output: its activations have no gradient. Choose another layer.")
            size = weight_rows(wide(delta).abs(), weights).movedim(axis, -1)  # (M, positions…, N)
            size = size.flatten(1, -2).mean(1) if size.dim() > 2 else size
            alpha[name] = alpha.get(name, 0) + size.sum(0)
        return alpha

    def _exact_calls(self, uses: Mapping[Tensor, int], values: Tensor) -> dict[str, _Call]:
        """Return the calls whose closed form is exact: one call, each weight used once, one row per sample.

        The last condition is checked once per module: with weights w, row m of δ of Σ_m w_m L_m must be w_m times row m of δ of Σ_m L_m.
        """
        once: dict[str, _Call] = {}
        for name, calls in self._calls.items():
            named = [p for p in self.model.get_submodule(name).parameters(recurse=False) if p.requires_grad]
            if len(calls) == 1 and calls[0].edge is not None and len(calls[0].a) == len(values) and all(uses.get(p) == 1 for p in named):
                once[name] = calls[0]
        unknown = {name: call for name, call in once.items() if name not in self._independent}
        if unknown and len(values) > 1:
            edges = [call.edge for call in unknown.values() if call.edge is not None]
            w = torch.linspace(0.5, 1.5, len(values), device=values.device, dtype=values.dtype)
            deltas = torch.autograd.grad(values.sum(), edges, retain_graph=True, allow_unused=True)
            weighted_deltas = torch.autograd.grad((w * values).sum(), edges, retain_graph=True, allow_unused=True)
            for name, delta, weighted in zip(unknown, deltas, weighted_deltas, strict=True):
                if delta is not None and weighted is not None and len(delta) == len(w) and 0 < float(delta.abs().max()) < math.inf:
                    gap = weighted - delta * w.to(delta.dtype).view(-1, *[1] * (delta.dim() - 1))
                    self._independent[name] = bool(gap.abs().max() <= ROUNDING[delta.dtype] * delta.abs().max())
                elif delta is not None and len(delta) != len(w):
                    self._independent[name] = False
        return {name: call for name, call in once.items() if self._independent.get(name, True)}

    def _other_parameters(self, exact: Mapping[str, Any], uses: Mapping[Tensor, int]) -> list[str]:
        """Return the trainable parameters that are used but have no exact closed form."""
        if not self.wanted:
            return []
        done = {id(p) for name in exact for p in self.model.get_submodule(name).parameters(recurse=False)}
        return [n for n, p in self.model.named_parameters() if p.requires_grad and p in uses and id(p) not in done]


def _edge(output: Tensor) -> tuple[GradientEdge | None, Tensor]:
    """Return where the gradient at `output` can be read, and the output to pass on.

    A view is copied: an in-place operation on a view would move the edge.
    """
    if not output.requires_grad:
        return None, output
    return get_gradient_edge(output), output.clone() if output._is_view() else output


def _tied_parameters(model: nn.Module) -> set[Tensor]:
    """Return the parameters that two modules share: a closed form would see only one of their uses."""
    seen: set[Tensor] = set()
    tied: set[Tensor] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (tied if parameter in seen else seen).add(parameter)
    return tied


def _count_uses(values: Tensor) -> dict[Tensor, int]:
    """Return how many times each leaf enters the autograd graph of `values`."""
    counts: dict[Tensor, int] = {}
    stack, seen = [values.grad_fn], {values.grad_fn}
    while stack:
        node = stack.pop()
        if type(node).__name__ == "CheckpointFunctionBackward":
            raise ValueError(
                "the model uses reentrant activation checkpointing, which hides its parameters from autograd; "
                "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        for following, _ in () if node is None else node.next_functions:
            variable = getattr(following, "variable", None)
            if variable is not None:
                counts[variable] = counts.get(variable, 0) + 1
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return counts
