"""Exact sums over per-sample gradients, for the price of one batch gradient.

Wanted: Σ_m |g_m|ᵖ for g_m = ∂L_m/∂θ (p = 1 for MAS, p = 2 for EWC), for every parameter θ. One forward pass collects each
module's input a; one backward pass gives δ, the gradient of the batch **sum** Σ_m L_m at each module's output, whose row m
belongs to sample m alone. `selfless.importance.closed` turns the two into the sum.

A closed form is used only where it was seen to hold: the module ran once, its weight is used once in the autograd graph, and weighting
the samples' losses weights the rows of δ alike. All other parameters go through `selfless.importance.fallback`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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

MEMORY = 128 * 2**20  # bytes that per-sample gradients may take at a time, unless a caller says otherwise


@dataclass
class _Call:
    a: Tensor
    edge: GradientEdge | None  # None: the output carries no gradient


@dataclass
class Reducer:
    """Hooks on a model that turn per-sample values L_m into Σ_m |∂L_m/∂θ|ᵖ and, for the taps, Σ_m |∂L_m/∂n|.

    Use: `with Reducer(model, taps) as r: r.listen(); out = forward(...); omega, alpha = r.reduce(values, ...)`.
    """

    model: nn.Module
    taps: Mapping[str, Tap] = field(default_factory=dict)
    memory: int = MEMORY
    wanted: bool = True  # False: only the taps are wanted, not the parameters
    lenient: bool = False  # leave out taps that no gradient reaches, instead of an error
    _calls: dict[str, list[_Call]] = field(default_factory=dict)
    _edges: dict[str, list[tuple[GradientEdge, int]]] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)
    _listening: bool = False
    _independent: dict[str, bool] = field(default_factory=dict)  # module name → sample m stays in row m (checked once)
    _fallback: Fallback = field(init=False)

    def __post_init__(self) -> None:
        self._fallback = Fallback(self.model)

    def __enter__(self) -> Reducer:
        names = {p: n for n, p in self.model.named_parameters() if p.requires_grad}
        tied = _tied(self.model)
        for name, module in self.model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            plain = own.keys() <= {"weight", "bias"}  # pruned or re-parametrised modules have others
            mine = any(p in names for p in own.values()) and not any(p in tied for p in own.values())
            if self.wanted and plain and mine and rule_for(module) is not None:
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
        """Forget the last forward pass and collect the next one."""
        self.clear()
        self._listening = True

    def clear(self) -> None:
        self._calls, self._edges, self._listening = {}, {}, False

    def _collect(self, name: str) -> Callable[..., Tensor | None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            given = first_tensor(args, kwargs)
            if not self._listening or given is None:
                return None
            edge, passed = _edge(output)
            self._calls.setdefault(name, []).append(_Call(given.detach(), edge))
            return passed

        return hook

    def _tap_output(self, name: str, tap: Tap) -> Callable[..., Tensor | None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
            if not self._listening:
                return None
            n = output if output.requires_grad else output.detach().requires_grad_()  # everything below is frozen
            edge, passed = _edge(n)
            assert edge is not None
            self._edges.setdefault(name, []).append((edge, neuron_axis(n, tap.axis)))
            return passed

        return hook

    def _tap_input(self, name: str, tap: Tap) -> Callable[..., tuple[Any, Any] | None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            given = first_tensor(args, kwargs)
            if not self._listening or given is None:
                return None
            n = given if given.requires_grad else given.detach().requires_grad_()
            edge, passed = _edge(n)
            assert edge is not None
            self._edges.setdefault(name, []).append((edge, neuron_axis(n, tap.axis)))
            return tuple(passed if v is given else v for v in args), {k: passed if v is given else v for k, v in kwargs.items()}

        return hook

    def _tap_resized(self, name: str, tap: Tap) -> Callable[..., None]:
        """An activation that changes the number of neurons (Maxout, GLU): α belongs to what comes out of it."""

        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            given = first_tensor(inputs, {})
            if self._listening and given is not None and output.shape != given.shape and output.requires_grad:
                self._edges[name][-1] = (get_gradient_edge(output), neuron_axis(output, tap.axis))

        return hook

    def reduce(
        self,
        values: Tensor,
        power: int,
        weights: Tensor | None = None,
        chunks: Chunks | None = None,
        retain: bool = False,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(Σ_m w_m |∂L_m/∂θ|ᵖ by parameter name, Σ_m w_m |∂L_m/∂n| by tap) for per-sample values L (M,).

        `chunks(names)` yields per-sample gradients {name: (m, *shape)} of parameters without a closed form.
        """
        self._stop_listening(values)
        uses = _uses(values) if self.wanted else {}
        covered = self._covered(uses, values) if self.wanted else {}
        taps = self._taps()
        edges = [call.edge for call in covered.values() if call.edge is not None] + [edge for _, edge, _ in taps]
        rest = self._rest(covered, uses)
        grads = list(torch.autograd.grad(values.sum(), edges, allow_unused=True, retain_graph=retain or bool(rest))) if edges else []
        rows = None if weights is None else (weights if power == 1 else weights.sqrt())

        omega: dict[str, Tensor] = {}
        for (name, call), delta in zip(covered.items(), grads, strict=False):
            module = self.model.get_submodule(name)
            if delta is None:
                continue  # the module ran, but nothing of it reaches the output
            delta, a = wide(delta), call.a if isinstance(module, nn.Embedding) else wide(call.a)
            rule = rule_for(module)
            assert rule is not None
            for key, value in rule(module, a, weight_rows(delta, rows), power, self.memory):
                omega[f"{name}.{key}" if name else key] = value
        if rest:
            omega |= self._fallback.reduce(rest, values, power, rows, chunks, retain)

        return omega, self._by_tap(grads[len(grads) - len(taps) :], weights)

    def neurons(self, values: Tensor, weights: Tensor | None = None, retain: bool = False) -> dict[str, Tensor]:
        """Σ_m w_m |∂L_m/∂n| by tap alone, of the last forward pass."""
        self._stop_listening(values)
        edges = [edge for _, edge, _ in self._taps()]
        grads = torch.autograd.grad(values.sum(), edges, allow_unused=True, retain_graph=retain) if edges else ()
        return self._by_tap(grads, weights)

    def _stop_listening(self, values: Tensor) -> None:
        """The forward pass is over: activation checkpointing runs the modules again during backward."""
        self._listening = False
        if not values.requires_grad:
            raise ValueError("the output does not depend on any trainable parameter: nothing to measure. Unfreeze some parameters.")

    def _taps(self) -> list[tuple[str, GradientEdge, int]]:
        """(name, edge, axis of the neurons), in the order of the forward pass."""
        return [(name, edge, axis) for name, edges in self._edges.items() for edge, axis in edges]

    def _by_tap(self, grads: Sequence[Tensor | None], weights: Tensor | None) -> dict[str, Tensor]:
        alpha: dict[str, Tensor] = {}
        for (name, _, axis), delta in zip(self._taps(), grads, strict=True):
            if delta is None and self.lenient:
                continue
            if delta is None:
                raise ValueError(f"layer {name!r} does not reach the output: its activations have no gradient. Choose another layer.")
            size = weight_rows(wide(delta).abs(), weights).movedim(axis, -1)  # (M, positions…, N): positions count as samples
            size = size.flatten(1, -2).mean(1) if size.dim() > 2 else size
            alpha[name] = alpha.get(name, 0) + size.sum(0)
        return alpha

    def _covered(self, uses: Mapping[Tensor, int], values: Tensor) -> dict[str, _Call]:
        """The calls whose closed form is exact: one call, each weight used once, one row a sample.

        The last is looked at, once: with random weights w, δ of Σ_m w_m L_m must be w_m times δ of Σ_m L_m in row m, for all rows.
        """
        once: dict[str, _Call] = {}
        for name, calls in self._calls.items():
            own = [p for p in self.model.get_submodule(name).parameters(recurse=False) if p.requires_grad]
            if len(calls) == 1 and calls[0].edge is not None and len(calls[0].a) == len(values) and all(uses.get(p) == 1 for p in own):
                once[name] = calls[0]
        unknown = {name: call for name, call in once.items() if name not in self._independent}
        if unknown and len(values) > 1:
            edges = [call.edge for call in unknown.values() if call.edge is not None]
            w = torch.linspace(0.5, 1.5, len(values), device=values.device, dtype=values.dtype)
            plain = torch.autograd.grad(values.sum(), edges, retain_graph=True, allow_unused=True)
            tilted = torch.autograd.grad((w * values).sum(), edges, retain_graph=True, allow_unused=True)
            for name, delta, other in zip(unknown, plain, tilted, strict=True):
                if delta is not None and other is not None and len(delta) == len(w) and 0 < float(delta.abs().max()) < math.inf:
                    gap = other - delta * w.to(delta.dtype).view(-1, *[1] * (delta.dim() - 1))
                    self._independent[name] = bool(gap.abs().max() <= ROUNDING[delta.dtype] * delta.abs().max())
                elif delta is not None and len(delta) != len(w):
                    self._independent[name] = False
        return {name: call for name, call in once.items() if self._independent.get(name, True)}

    def _rest(self, covered: Mapping[str, Any], uses: Mapping[Tensor, int]) -> list[str]:
        """Parameters that are used, want a gradient and have no closed form here."""
        if not self.wanted:
            return []
        done = {id(p) for name in covered for p in self.model.get_submodule(name).parameters(recurse=False)}
        return [n for n, p in self.model.named_parameters() if p.requires_grad and p in uses and id(p) not in done]


def _edge(output: Tensor) -> tuple[GradientEdge | None, Tensor]:
    """Where the gradient at `output` can be read, and what to pass on: a view is copied, lest work in place on it moves the edge."""
    if not output.requires_grad:
        return None, output
    return get_gradient_edge(output), output.clone() if output._is_view() else output


def _tied(model: nn.Module) -> set[Tensor]:
    """Parameters that two modules own: a closed form would see only one of their uses."""
    seen: set[Tensor] = set()
    tied: set[Tensor] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (tied if parameter in seen else seen).add(parameter)
    return tied


def _uses(values: Tensor) -> dict[Tensor, int]:
    """How many times each leaf enters the autograd graph of `values`."""
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
