"""Exact sums over per-sample gradients, for the price of one batch gradient.

The goal is Σ_m |g_m|ᵖ with g_m = ∂L_m/∂θ (p = 1 for MAS, p = 2 for EWC), for every parameter θ. One forward pass collects the input a of
each module. One backward pass gives δ, the gradient of the batch **sum** Σ_m L_m at the output of each module. Row m of δ depends on
sample m alone. `selfless.importance.closed` computes the sum from a and δ as soon as the backward pass reaches the module. Parameters
outside of such modules go by the operation that uses them (`selfless.importance.uses`).

A closed form is used only after a check that it is exact (`selfless.importance.exactness`). All other parameters go through
`selfless.importance.fallback`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from selfless.distributed import Reduction
from selfless.distributed.shards import watch_whole_parameters
from selfless.functional.shapes import wide
from selfless.importance.closed import rule_for
from selfless.importance.exactness import Exactness, with_samples_second
from selfless.importance.fallback import Chunks, Fallback, weight_rows
from selfless.importance.graph import Graph, Place, Use, shape_of, stream_gradients
from selfless.importance.loop import Sums, add_sum
from selfless.importance.uses import can_join, is_supported
from selfless.importance.waiting import Pass, WaitingParameter
from selfless.network.layers import Tap
from selfless.network.roles import first_tensor, neuron_axis

MEMORY = 128 * 2**20  # default for the bytes that per-sample gradients may take at a time


@dataclass
class _Call:
    """One call of a module: its input, and where the gradient at its output can be read."""

    a: Tensor | None  # None once it was used
    edge: GradientEdge | None  # None if the output needs no gradient


@dataclass
class Reducer:
    """Hooks on a model that compute Σ_m |∂L_m/∂θ|ᵖ and, for the taps, Σ_m |∂L_m/∂n| from per-sample values L_m.

    Use: `with Reducer(model, taps) as r: r.listen(); out = forward(...); r.reduce(values, omega=omega, alpha=alpha, ...)`.
    """

    model: nn.Module
    taps: Mapping[str, Tap] = field(default_factory=dict)
    memory: int = MEMORY
    wanted: bool = True  # False: measure only the taps, not the parameters
    lenient: bool = False  # leave out taps without a gradient instead of raising an error
    reduction: Reduction = field(default_factory=Reduction)
    _calls: dict[str, list[_Call]] = field(default_factory=dict)
    _edges: dict[str, list[tuple[GradientEdge, int]]] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)
    _listening: bool = False
    _mask: Tensor | None = None  # (M, positions): the tokens that count; None: all
    _exactness: Exactness = field(init=False)
    _fallback: Fallback = field(init=False)
    _modules: dict[str, nn.Module] = field(init=False)
    _parameters: dict[str, nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self._modules, self._parameters = dict(self.model.named_modules()), dict(self.model.named_parameters())
        self._fallback, self._exactness = Fallback(self.model), Exactness(self._parameters, self.memory)

    def __enter__(self) -> Reducer:
        self._handles += watch_whole_parameters(self.model, self._parameters)
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

    def listen(self, mask: Tensor | None = None) -> None:
        """Forget the last forward pass and collect from the next one; `mask` (M, positions) says which tokens count."""
        self.clear()
        self._listening, self._mask = True, mask

    def clear(self) -> None:
        """Forget the last forward pass."""
        self._calls, self._edges, self._listening = {}, {}, False

    # ------------------------------------------------------------------------------------------------------------ forward hooks
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
            return self._note_tap(name, tap, output)

        return hook

    def _tap_input(self, name: str, tap: Tap) -> Callable[..., tuple[Any, Any] | None]:
        """Return a forward pre-hook for a layer whose n is the input of an activation module."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            x = first_tensor(args, kwargs)
            if not self._listening or x is None:
                return None
            result = self._note_tap(name, tap, x)
            return tuple(result if v is x else v for v in args), {k: result if v is x else v for k, v in kwargs.items()}

        return hook

    def _note_tap(self, name: str, tap: Tap, n: Tensor) -> Tensor:
        """Note the edge of n in the graph; return the tensor that takes the place of n."""
        n = n if n.requires_grad else n.detach().requires_grad_()  # all layers before it are frozen
        edge, result = _edge(n)
        assert edge is not None
        self._edges.setdefault(name, []).append((edge, neuron_axis(n, tap.axis)))
        return result

    def _tap_resized(self, name: str, tap: Tap) -> Callable[..., None]:
        """Return a forward hook that moves a tap to the output of an activation that changes the number of neurons (Maxout, GLU)."""

        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            x = first_tensor(inputs, {})
            if self._listening and x is not None and output.shape != x.shape and output.requires_grad:
                self._edges[name][-1] = (get_gradient_edge(output), neuron_axis(output, tap.axis))

        return hook

    # ------------------------------------------------------------------------------------------------------------ backward pass
    def reduce(
        self,
        values: Tensor,
        power: int,
        weights: Tensor | None = None,
        chunks: Chunks | None = None,
        retain: bool = False,
        *,
        omega: Sums,
        alpha: Sums | None,
    ) -> None:
        """Add Σ_m w_m |∂L_m/∂θ|ᵖ by parameter to `omega`, and Σ_m w_m |∂L_m/∂n| by tap to `alpha`, for per-sample values L (M,).

        `chunks(names)` yields per-sample gradients {name: (m, *shape)} of parameters without a closed form.
        """
        self._stop_listening(values)
        rows = None if weights is None else (weights if power == 1 else weights.sqrt())
        graph, now = Graph.of(values), Pass(len(values), power, rows, retain)
        modules = self._exact_modules(graph, values)
        done = {own for name in modules for own in self._own(name)}
        others = [n for n, p in self._parameters.items() if p.requires_grad and p in graph.counts and n not in done]
        shared = [self._shared(name, uses, layouts, now, omega) for name, uses, layouts in self._exact_uses(graph, values, others)]
        rest = [name for name in others if name not in {s.name for s in shared}]
        self.reduction.check_names(rest or [*done, *others], closed=not rest)
        places = [self._module_place(name, call, now, omega) for name, call in modules.items()]
        places += [place for one in shared for place in one.places()]
        found: dict[int, Tensor] = {}
        places += self._tap_places(found, values, weights is not None) if alpha is not None else []
        stream_gradients(values, graph, places, retain or bool(rest))
        for one in shared:
            one.finish()
        if rest:
            usable = _no_chunks if chunks is not None and values.is_cuda and self._exactness.is_by_data else chunks
            for name, value in self._fallback.reduce(rest, values, power, rows, usable, retain).items():
                add_sum(omega, name, value)
        if alpha is not None:
            self._sum_by_tap(found, len(values), weights, alpha)

    def neurons(self, values: Tensor, weights: Tensor | None = None, retain: bool = False, *, alpha: Sums) -> None:
        """Add only Σ_m w_m |∂L_m/∂n| by tap, of the last forward pass, to `alpha`."""
        self._stop_listening(values)
        found: dict[int, Tensor] = {}
        stream_gradients(values, Graph.of(values), self._tap_places(found, values, weights is not None), retain)
        self._sum_by_tap(found, len(values), weights, alpha)

    def _stop_listening(self, values: Tensor) -> None:
        """End the collection: during backward, activation checkpointing runs the modules again."""
        self._listening = False
        if not values.requires_grad:
            raise ValueError("the output does not depend on any trainable parameter: nothing to measure. Unfreeze some parameters.")

    # ------------------------------------------------------------------------------------------------------------- closed forms
    def _exact_modules(self, graph: Graph, values: Tensor) -> dict[str, _Call]:
        """Return the calls whose closed form is exact: one call, each weight used once and in this call, one row per sample."""
        once: dict[str, _Call] = {}
        self._exactness.begin(graph, len(values))
        for name, calls in self._calls.items():
            named = [self._parameters[own] for own in self._own(name) if self._parameters[own].requires_grad]
            edge = calls[0].edge if len(calls) == 1 else None
            is_single = edge is not None and all(graph.counts.get(p) == 1 and graph.is_read_by(p, edge.node) for p in named)
            if is_single and calls[0].a is not None and calls[0].a.dim() and len(calls[0].a) == len(values):
                once[name] = calls[0]
        exact = self._exactness.exact_modules(values, {n: c.edge for n, c in once.items() if c.edge is not None})
        return {name: call for name, call in once.items() if name in exact}

    def _own(self, name: str) -> list[str]:
        """Return the names of the parameters that a module holds itself."""
        return [f"{name}.{key}" if name else key for key, _ in self._modules[name].named_parameters(recurse=False)]

    def _exact_uses(self, graph: Graph, values: Tensor, names: list[str]) -> list[tuple[str, list[Use], list[str]]]:
        """Return (parameter, uses, layout of the samples in each) of the parameters all of whose uses have an exact closed form."""
        every = {name: graph.uses(self._parameters[name], len(values)) for name in names}
        every = {name: uses for name, uses in every.items() if uses and can_join(uses) and all(is_supported(use) for use in uses)}
        layouts = self._exactness.exact_uses(values, every)
        return [(name, every[name], found) for name, found in layouts.items()]

    def _module_place(self, name: str, call: _Call, now: Pass, omega: Sums) -> Place:
        """Return where δ of a module is read, and the function that adds its sums to `omega`."""
        module, rule = self._modules[name], rule_for(self._modules[name])
        assert rule is not None
        assert call.edge is not None

        def receive(delta: Tensor) -> None:
            assert call.a is not None
            a = call.a if isinstance(module, nn.Embedding) else wide(call.a)
            for key, value in rule(module, a, weight_rows(wide(delta), now.rows), now.power, self.memory):
                add_sum(omega, f"{name}.{key}" if name else key, value)
            if not now.retain:
                call.a = None  # its memory is free from here on

        return call.edge, receive

    def _shared(self, name: str, uses: list[Use], layouts: list[str], now: Pass, omega: Sums) -> WaitingParameter:
        return WaitingParameter(name, self._parameters[name].shape, uses, layouts, now, self.memory, omega)

    # --------------------------------------------------------------------------------------------------------------------- taps
    def _tap_edges(self) -> list[tuple[str, GradientEdge, int]]:
        """Return (name, edge, axis of the neurons) of each tap, in the order of the forward pass."""
        return [(name, edge, axis) for name, edges in self._edges.items() for edge, axis in edges]

    def _tap_places(self, found: dict[int, Tensor], values: Tensor, is_weighted: bool) -> list[Place]:
        """Return where δ of each tap is read, and functions that put Σ… (see `_sum_by_tap`) into `found` by the number of the tap."""
        count, edges = len(values), self._tap_edges()
        second: set[int] = set()  # those with as many positions as samples whose samples are second
        if count > 1 and (is_weighted or self._mask is not None):  # else both orders have the same mean
            square = {i: (edge, axis) for i, (_, edge, axis) in enumerate(edges) if _is_square(edge, axis, count)}
            second = with_samples_second(values, square) if square else second

        def receive(i: int, axis: int, delta: Tensor) -> None:
            size = wide(delta).abs().movedim(axis, -1)  # (M, positions…, N)
            if i in second or (size.dim() == 3 and len(size) != count and size.shape[1] == count):
                size = size.movedim(1, 0)  # (positions, M, N), as in attention without batch_first
            if self._mask is not None and size.dim() == 3 and size.shape[:2] == self._mask.shape:
                counted = self._mask.to(size.dtype)
                found[i] = torch.einsum("mtn,mt->mn", size, counted) / counted.sum(1, keepdim=True).clamp(min=1)
            else:
                found[i] = size.flatten(1, -2).mean(1) if size.dim() > 2 else size

        return [(edge, partial(receive, i, axis)) for i, (_, edge, axis) in enumerate(edges)]

    def _sum_by_tap(self, found: Mapping[int, Tensor], count: int, weights: Tensor | None, alpha: Sums) -> None:
        """Add Σ_m w_m |δ_m| by tap; |δ_m| is averaged over positions, without padded tokens, also where these are rows, (M·T, N)."""
        total: Sums = {}
        for i, (name, _, _) in enumerate(self._tap_edges()):
            if i not in found and self.lenient:
                continue
            if i not in found:
                raise ValueError(
                    f"layer {name!r} does not reach the output: its activations have no gradient. Choose another layer; for local MAS "
                    "one whose activation directly follows a linear layer or a convolution"
                )
            if weights is not None and len(found[i]) != len(weights):
                raise ValueError(
                    f"layer {name!r} ran on {len(found[i])} rows of a batch of {len(weights)} samples, so its neurons cannot be weighted "
                    "by sample, as fisher='exact' does; take another fisher=, or leave this layer out: layers=[…]"
                )
            total[name] = total.get(name, 0) + weight_rows(found[i], weights).sum(0) * min(1.0, count / max(len(found[i]), 1))
        for name, value in total.items():
            add_sum(alpha, name, value)


def _is_square(edge: GradientEdge, axis: int, count: int) -> bool:
    """Return True if a tap has three axes, and as many positions as samples."""
    shape = list(shape_of(edge.node) or ())
    return len(shape) == 3 and shape[: axis % 3] + shape[axis % 3 + 1 :] == [count, count]


def _edge(output: Tensor) -> tuple[GradientEdge | None, Tensor]:
    """Return where the gradient at `output` can be read, and the output to pass on.

    A view is copied: an in-place operation on a view would move the edge.
    """
    if not output.requires_grad:
        return None, output
    with torch.enable_grad():  # torch 2.4 finds the edge of a leaf through a view of it, which no_grad would detach
        edge = get_gradient_edge(output)
    return edge, output.clone() if output._is_view() else output


def _tied_parameters(model: nn.Module) -> set[Tensor]:
    """Return the parameters that two modules share: a closed form would see only one of their uses."""
    seen: set[Tensor] = set()
    tied: set[Tensor] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (tied if parameter in seen else seen).add(parameter)
    return tied


def _no_chunks(_names: list[str]) -> Iterator[dict[str, Tensor]]:
    """Refuse vmap: for one sample alone a row number of the batch may be out of range, which ends a program on a GPU."""
    raise ValueError("its data choose rows")
