"""Exact reductions of per-sample gradients, at the price of a batch gradient.

Wanted: Σ_m |g_m|ᵖ for g_m = ∂L_m/∂θ (p = 1 for MAS, p = 2 for EWC), for every parameter θ. One forward pass records each
module's input a; one backward pass gives δ, the gradient of the batch **sum** Σ_m L_m at each module's output, whose row m
belongs to sample m alone; `selfless.importance.closed` turns the two into the sum.

Parameters without a closed form (other modules, weights used in two places, modules that fold the batch into another axis) are
found by looking, not by faith: a module must have run once, its weight must be used once in the autograd graph, and weighting the
samples' losses must weight the rows of δ alike. The rest goes through `vmap(grad)`, and what vmap cannot do through a loop.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from selfless.importance.closed import reduced, rule_for
from selfless.network.layers import Tap
from selfless.network.roles import first_tensor, neuron_axis

MEMORY = 128 * 2**20  # bytes that per-sample gradients may take at a time, unless a caller says otherwise

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}  # of two ways to the same gradient


# -------------------------------------------------------------------------------------------------------------- the recorder
@dataclass
class _Call:
    a: Tensor
    edge: GradientEdge | None  # None: the output carries no gradient


@dataclass
class Recorder:
    """Hooks on a model that turn per-sample values L_m into Σ_m |∂L_m/∂θ|ᵖ and, for the taps, Σ_m |∂L_m/∂n|.

    Use: `with Recorder(model, taps) as r: out = forward(...); omega, alpha = r.reduce(values, ...)`.
    """

    model: nn.Module
    taps: Mapping[str, Tap] = field(default_factory=dict)
    memory: int = MEMORY
    wanted: bool = True  # whether parameters are wanted, or the taps alone
    lenient: bool = False  # whether taps that no gradient reaches are left out
    _calls: dict[str, list[_Call]] = field(default_factory=dict)
    _edges: dict[str, list[tuple[GradientEdge, int]]] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)
    _listening: bool = False
    _independent: dict[str, bool] = field(default_factory=dict)  # module name → sample m stays in row m (checked once)
    _proven: bool = False  # vmap's gradients were seen to add up
    _defiant: bool = False  # vmap cannot run this model

    def __enter__(self) -> Recorder:
        names = {p: n for n, p in self.model.named_parameters() if p.requires_grad}
        tied = _tied(self.model)
        for name, module in self.model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            plain = own.keys() <= {"weight", "bias"}  # pruned or re-parametrised modules have others
            mine = any(p in names for p in own.values()) and not any(p in tied for p in own.values())
            if self.wanted and plain and mine and rule_for(module) is not None:
                self._handles.append(module.register_forward_hook(self._record(name), prepend=True, with_kwargs=True))
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
        """Forget the last forward pass and record the next one."""
        self.clear()
        self._listening = True

    def clear(self) -> None:
        self._calls, self._edges, self._listening = {}, {}, False

    def _record(self, name: str) -> Callable[..., Tensor | None]:
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
        fallback: Callable[[list[str]], Iterable[dict[str, Tensor]]] | None = None,
        retain: bool = False,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(Σ_m w_m |∂L_m/∂θ|ᵖ by parameter name, Σ_m w_m |∂L_m/∂n| by tap) for per-sample values L (M,).

        `fallback(names)` yields chunks {name: (m, *shape)} of per-sample gradients for parameters without a closed form.
        """
        self._listening = False  # activation checkpointing runs the modules again during backward
        if not values.requires_grad:
            raise ValueError("the output does not depend on any trainable parameter: nothing to measure. Unfreeze some parameters.")
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
            delta, a = _wide(delta), call.a if isinstance(module, nn.Embedding) else _wide(call.a)
            rule = rule_for(module)
            assert rule is not None
            for key, value in rule(module, a, _weighted(delta, rows), power, self.memory):
                omega[f"{name}.{key}" if name else key] = value
        if rest:
            omega |= self._fall_back(rest, values, power, rows, fallback, retain)

        return omega, self._by_tap(grads[len(grads) - len(taps) :], weights)

    def neurons(self, values: Tensor, weights: Tensor | None = None, retain: bool = False) -> dict[str, Tensor]:
        """Σ_m w_m |∂L_m/∂n| by tap alone, of the recorded pass."""
        self._listening = False
        edges = [edge for _, edge, _ in self._taps()]
        return self._by_tap(torch.autograd.grad(values.sum(), edges, allow_unused=True, retain_graph=retain), weights)

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
            size = _weighted(_wide(delta).abs(), weights).movedim(axis, -1)  # (M, positions…, N): positions count as samples
            size = size.flatten(1, -2).mean(1) if size.dim() > 2 else size
            alpha[name] = alpha.get(name, 0) + size.sum(0)
        return alpha

    def covered(self, values: Tensor) -> set[str]:
        """The parameters whose closed form is exact in the recorded pass that gave per-sample `values` (M,)."""
        self._listening = False
        calls = self._covered(_uses(values), values)
        return {f"{n}.{k}" if n else k for n in calls for k, _ in self.model.get_submodule(n).named_parameters(recurse=False)}

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
                    self._independent[name] = bool(gap.abs().max() <= _ROUNDING[delta.dtype] * delta.abs().max())
                elif delta is not None and len(delta) != len(w):
                    self._independent[name] = False
        return {name: call for name, call in once.items() if self._independent.get(name, True)}

    def _rest(self, covered: Mapping[str, Any], uses: Mapping[Tensor, int]) -> list[str]:
        """Parameters that are used, want a gradient and have no closed form here."""
        if not self.wanted:
            return []
        done = {id(p) for name in covered for p in self.model.get_submodule(name).parameters(recurse=False)}
        return [n for n, p in self.model.named_parameters() if p.requires_grad and p in uses and id(p) not in done]

    def _fall_back(
        self,
        names: list[str],
        values: Tensor,
        power: int,
        rows: Tensor | None,
        fallback: Callable[[list[str]], Iterable[dict[str, Tensor]]] | None,
        retain: bool,
    ) -> dict[str, Tensor]:
        """Per-sample gradients by vmap(grad); where the model defies vmap, one backward pass per sample: slow, as exact."""
        parameters = [self.model.get_parameter(n) for n in names]
        if fallback is not None and not self._defiant:
            try:
                return self._checked(names, parameters, values, fallback(names), power, rows)
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                warnings.warn(
                    f"importance of {', '.join(names[:3])}{'…' if len(names) > 3 else ''} is taken sample by sample, exact but "
                    f"slow: vmap cannot run this model ({reason}).",
                    stacklevel=2,
                )
        self._defiant = True

        def one(m: int) -> dict[str, Tensor]:
            last = m == len(values) - 1 and not retain
            grads = torch.autograd.grad(values[m], parameters, retain_graph=not last, allow_unused=True)
            found = zip(names, parameters, grads, strict=True)
            return {n: (torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g)[None] for n, p, g in found}

        return _sum_chunks((one(m) for m in range(len(values))), power, rows)[0]

    def _checked(
        self, names: list[str], parameters: list[Any], values: Tensor, chunks: Iterable[dict[str, Tensor]], power: int, rows: Tensor | None
    ) -> dict[str, Tensor]:
        """The vmapped reduction; the first time, its per-sample gradients must add up to the batch's gradient."""
        total, plain = _sum_chunks(chunks, power, rows)
        if not self._proven:
            grads = torch.autograd.grad(values.sum(), parameters, retain_graph=True, allow_unused=True)
            for name, g in zip(names, grads, strict=True):
                g = torch.zeros_like(plain[name]) if g is None else _wide(g.to_dense() if g.is_sparse else g)
                if bool(torch.isfinite(g).all()) and not bool(
                    (plain[name] - g).abs().max() <= 30 * _ROUNDING[g.dtype] * g.abs().max().clamp(min=1e-12)
                ):
                    raise ValueError("its batches do not split into samples along their first axis")
            self._proven = True
        return total


def vmapped(
    call: Callable[[dict[str, Tensor], Any, Any], Tensor],
    parameters: dict[str, Tensor],
    batch: Any,
    target: Any,
    count: int,
    memory: int,
) -> Iterator[dict[str, Tensor]]:
    """Chunks of per-sample gradients of `call(parameters, batch of one, target of one) -> scalar`, by vmap(grad)."""
    size = sum(p.numel() * p.element_size() for p in parameters.values())
    step = max(1, memory // max(1, size))
    mapped = tree_map(lambda leaf: 0 if _per_sample(leaf, count) else None, (batch, target))

    def single(parameters: dict[str, Tensor], both: Any) -> Tensor:
        batch, target = tree_map(lambda leaf, axis: leaf.unsqueeze(0) if axis == 0 else leaf, both, mapped)
        return call(parameters, batch, target)

    gradient = torch.func.vmap(torch.func.grad(single), in_dims=(None, mapped))
    for start in range(0, count, step):
        chunk = tree_map(lambda leaf, s=start: leaf[s : s + step] if _per_sample(leaf, count) else leaf, (batch, target))
        with sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels have no batching rule; plain matmuls do
            found = gradient(parameters, chunk)
        yield found


def _per_sample(leaf: Any, count: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == count


def _sum_chunks(chunks: Iterable[dict[str, Tensor]], power: int, rows: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(Σ_m w_m |g_m|ᵖ, Σ_m g_m) over chunks of per-sample gradients."""
    total: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    start = 0
    for chunk in chunks:
        count = len(next(iter(chunk.values())))
        part = None if rows is None else rows[start : start + count]
        for name, g in chunk.items():
            value = reduced(_weighted(_wide(g), part), power)
            total[name] = total[name] + value if name in total else value
            plain[name] = plain[name] + _wide(g).sum(0) if name in plain else _wide(g).sum(0)
        start += count
    return total, plain


def _edge(output: Tensor) -> tuple[GradientEdge | None, Tensor]:
    """Where the gradient at `output` can be read, and what to pass on: a view is copied, lest work in place on it moves the edge."""
    if not output.requires_grad:
        return None, output
    return get_gradient_edge(output), output.clone() if output._is_view() else output


def _weighted(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x * rows.to(x.dtype).view(-1, *[1] * (x.dim() - 1))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


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
