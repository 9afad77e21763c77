"""Ω and α of every member of a fleet: the stacked backend of the loop in `selfless.importance.loop`.

A native network is measured for all members at once. Any other network, one with batch norm, and an objective that works layer by layer,
are measured member by member with `selfless.importance.measure`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfless.engine.kinds import join, take
from selfless.engine.native.forward import forward
from selfless.engine.native.options import ForwardOptions, Measure
from selfless.engine.stack import Stack, Tensors
from selfless.importance import Importance, Objective, measure
from selfless.importance.closed import power_of
from selfless.importance.loop import Sums, accumulate, add_sum
from selfless.importance.objectives import is_by_layer
from selfless.network.calling import evaluating
from selfless.network.layers import Tap
from selfless.preserve.base import Measurement, Preserver, measurements

if TYPE_CHECKING:
    from selfless.engine.fleet import Fleet

Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]  # returns a new pass over x (F, B, …), y (F, B)


def measure_task(fleet: Fleet, head: slice, order: Tensor | None) -> tuple[list[Tensors], Tensors]:
    """Return Ω of every member for each preserver, and α, measured on the task that ends; `order` (F, n): the samples to read."""
    found = [_measure_kind(fleet, preserve.parts, members, head, order) for preserve, members in fleet.kinds]
    return [join([omegas[k] for omegas, _ in found]) for k in range(len(fleet.parts))], join([alpha for _, alpha in found])


def _measure_kind(
    fleet: Fleet, terms: Sequence[Preserver], members: slice, head: slice, order: Tensor | None
) -> tuple[list[Tensors], Tensors]:
    """Measure Ω for each of these preservers and α, of the members that have them."""
    data, stack = fleet.step.data.of(members), fleet.stack
    params, buffers = take(fleet.params, members), take(fleet.buffers, members)
    omegas: list[Tensors] = [{} for _ in terms]
    alpha: Tensors = {}
    for wanted in measurements(terms):
        if not wanted.users and not stack.layers:
            continue
        size = fleet.run.batch if wanted.estimator == "per-batch" else fleet.at_once(fleet.step.data, fleet.run.batch, trains=True)

        def batches(size: int = size) -> Iterator[tuple[Tensor, Tensor]]:
            rows = None if order is None else order[members]
            return ((x.to(fleet.step.dtype), y) for x, y in data.passes(size, fleet.still, rows))

        gates, stack.gates = stack.gates, take(stack.gates, members)
        try:
            omega, neurons = measure_fleet(stack, params, buffers, batches, wanted, head, data.positive)
        finally:
            stack.gates = gates
        alpha = neurons if wanted.neurons else alpha
        for user in wanted.users:
            omegas[user] = omega
    return omegas, alpha


def measure_fleet(
    stack: Stack, params: Tensors, buffers: Tensors, batches: Batches, wanted: Measurement, head: slice, positive: bool = False
) -> tuple[Tensors, Tensors]:
    """Return (Ω, α) of every member, stacked, in one pass.

    f is the output in the columns `head`, and labels are counted from its first column. `positive`: no input is below zero.
    """
    with evaluating(stack.module):
        if stack.native and not stack.normalises and not is_by_layer(wanted.objective):
            return _measure_stacked(stack, params, batches, wanted, head, positive)
        members = range(len(next(iter(params.values()))))
        parts = [_measure_member(stack, m, params, buffers, batches, wanted, head) for m in members]
        return _stack([p.omega for p in parts]), _stack([p.alpha for p in parts])


def _measure_stacked(
    stack: Stack, params: Tensors, batches: Batches, wanted: Measurement, head: slice, positive: bool
) -> tuple[Tensors, Tensors]:
    """Measure all members at once; a parameter or layer that the output does not depend on has importance 0."""
    backend = StackedBackend(stack, params, wanted, head, positive)
    alpha_objective = wanted.alpha_objective if backend.layers else None
    found = accumulate(batches(), backend, wanted.objective, alpha_objective, parameters=bool(wanted.users), neurons=bool(backend.layers))
    omega = {n: found.omega[n] if n in found.omega else torch.zeros_like(params[n]) for n in backend.names}
    alpha = {n: found.alpha[n] if n in found.alpha else torch.zeros_like(p) for n, p in backend.probes.items()}
    _check_chain({n: w for n, w in omega.items() if n in found.omega and n.endswith("weight")})
    return omega, alpha


def _check_chain(weights: Tensors) -> None:
    """Raise an error if Ω of a layer is 0 in all entries although Ω of a layer before it is not: one network cannot have both.

    Whatever reaches an earlier layer has passed this one. So its kernel is at fault (docs/lab-notes/pitfalls.md). Layers are in order.
    """
    if not weights:
        return
    largest = torch.stack([w.flatten(1).amax(1) for w in weights.values()])  # (layers, F)
    before = (largest > 1e-12).cumsum(0) > 0
    faulty = ((largest == 0) & before).any(1).tolist()
    names = [name for name, wrong in zip(weights, faulty, strict=True) if wrong]
    if names:
        raise RuntimeError(
            f"the importance of {', '.join(names)} is 0 in every entry, but not that of a layer before: this device computes it wrongly. "
            "Train on a CPU (--device cpu), and please report the device and the versions of PyTorch and Triton"
        )


class StackedBackend:
    """The backend of `accumulate` for a fleet: one backward pass gives Σ_m |∂L_m/∂θ|ᵖ and Σ_m |∂L_m/∂n| of every member."""

    def __init__(self, stack: Stack, params: Tensors, wanted: Measurement, head: slice, positive: bool) -> None:
        self.stack, self.params, self.head, self.positive = stack, params, head, positive
        self.names = stack.trainable if wanted.users else []
        self.layers = stack.layers if wanted.neurons else ()
        self.leaves = {n: p.detach().requires_grad_(n in self.names) for n, p in params.items()}
        self.probes: Tensors = {}  # layer → zeros (F, N), whose "gradient" is Σ_m |∂L_m/∂n|
        self.exact = bool(wanted.users) and wanted.estimator == "per-sample"
        self.power = wanted.objective.power
        self._measure = Measure(0)
        self._shape = torch.Size()

    def forward(self, batch: Any) -> tuple[Tensor, Any, int]:
        """Run all members on a batch; return outputs and labels with members and samples in one axis, and B."""
        x, y = batch
        if self.layers and not self.probes:
            with torch.no_grad():
                widths = self.stack.widths(self.params, {}, x[:, :1])
            self.probes = {n: torch.zeros(len(x), width, device=x.device, requires_grad=True) for n, width in widths.items()}
        self._measure, self._shape = Measure(self.power if self.exact else 0), x.shape[:2]
        options = ForwardOptions(
            self.layers,
            measure=self._measure if self.exact else None,
            weights=self._measure,
            probes=self.probes,
            resized=self.stack.resized,
            positive=self.positive,
            gates={n: g.detach() for n, g in self.stack.gates.items()},
        )
        output = forward(self.stack.module, self.leaves, x, options)[..., self.head].flatten(0, 1).float()
        return output, (y - (self.head.start or 0)).flatten(), x.shape[1]

    def reduce(
        self,
        objective: Objective,
        output: Tensor,
        target: Any,
        weight: Tensor | None,
        *,
        omega: Sums | None,
        alpha: Sums | None,
        retain: bool,
    ) -> None:
        """Add the sums of `Backend.reduce`, stacked over members."""
        values, power, self._measure.rows = objective.value(output, target), self.power, None
        if weight is not None:
            rows = weight.view(self._shape)
            self._measure.rows = rows if self.exact else None if power == 1 else rows.sqrt()  # |w^½ ∂θ|² = w |∂θ|², w^½·w^½ |∂n| = w |∂n|
            values = values if self.exact else values * (weight if power == 1 else weight.sqrt())
        sources = {n: self.leaves[n] for n in self.names} if omega is not None else {}
        sources |= self.probes if alpha is not None else {}
        grads = torch.autograd.grad(values.sum(), list(sources.values()), retain_graph=retain, allow_unused=True)
        for name, g in zip(sources, grads, strict=True):
            if g is not None and name in self.probes and alpha is not None:
                add_sum(alpha, name, g)
            elif g is not None and omega is not None:
                add_sum(omega, name, g if self.exact else power_of(g, power))


def _measure_member(
    stack: Stack, m: int, params: Tensors, buffers: Tensors, batches: Batches, wanted: Measurement, head: slice
) -> Importance:
    """Measure one member with the module itself."""
    stack.load_member(m, params, buffers)

    def call(model: nn.Module, batch: Any) -> Tensor:
        stack.live_gates = {n: g[m].detach() for n, g in stack.gates.items()}
        output: Tensor = stack.run_module(model, batch[0])[:, head]
        stack.live_gates = {}
        return output

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in batches():
            yield x[m].float(), y[m] - (head.start or 0)  # inputs may be bf16, but the module is float32

    layers = stack.layers if wanted.neurons else ()
    return measure(
        stack.module,
        pairs(),
        wanted.objective,
        alpha_objective=wanted.alpha_objective,
        taps={name: Tap(stack.module.get_submodule(name), at_input=name not in stack.resized) for name in layers},
        parameters=bool(wanted.users),
        estimator=wanted.estimator,
        forward=call,
        finite=False,  # a member that diverged gives a failed result, not an error
    )


def _stack(parts: list[Tensors]) -> Tensors:
    return {n: torch.stack([p[n] for p in parts]) for n in parts[0]}
