"""The penalties of every member at the end of an epoch, each apart, for records and trackers. Training does not depend on them.

    inhibition     λ R on the first batch of the epoch, in evaluation mode
    anchor         λ Σ Ω(θ − θ*)²; for the implicit anchor, the penalty that it stands for
    distillation   λ D on the same batch, with the damped λ
    penalty        λ times any other penalty of a preserver on θ

The last three are there from the second task on. The gates of HAT and replayed samples are not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from selfless.engine.fleet import Fleet
from selfless.engine.stack import by_member
from selfless.network.calling import evaluating
from selfless.preserve.base import cost_of
from selfless.preserve.capabilities import Anchored, Distils
from selfless.spec import Run


def has_penalty(run: Run, name: str) -> bool:
    """Return False if only other members of its fleet have the penalty of this name."""
    if name in ("anchor", "penalty"):
        return any(part.is_on and isinstance(part, Anchored) == (name == "anchor") for part in run.preserve.parts)
    return run.sparsify.is_on if name == "inhibition" else True


def read_penalties(found: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return the tensors of `penalty_tensors` as numbers with six digits."""
    return {name: [float(f"{one:.6g}") for one in value.double().tolist()] for name, value in found.items()}


@torch.no_grad()
def penalty_tensors(fleet: Fleet) -> dict[str, Tensor]:
    """Return {name: the value of every member, (F,)}. Nothing waits for the device."""
    rates, found = fleet.rates, dict[str, Tensor]()

    def add(name: str, value: Tensor) -> None:
        found[name] = found[name] + value if name in found else value

    sparse = [k for k, slot in enumerate(fleet.slots) if slot.is_on(slice(None))]
    distils = bool(fleet.step.past) and any(isinstance(part.term, Distils) for part in fleet.parts)
    if sparse or distils:
        x, outputs = _first_batch(fleet)
        for k in sparse:
            add("inhibition", rates.sparsify[k] * fleet.step.sizes(k, outputs[1]))
        for k, part in enumerate(fleet.parts):
            cost = part.distillation(fleet.params, fleet.buffers, x, outputs, fleet.step.past)
            if cost is not None:
                add("distillation", rates.preserve[k] * part.damping(rates.step_lambda(k)) * cost)
    for k, part in enumerate(fleet.parts):
        if fleet.tasks and part.term.penalises and any(run.preserve.parts[k].is_on for run in fleet.runs):
            name = "anchor" if isinstance(part.term, Anchored) else "penalty"
            state = {group: {n: _wide(t) for n, t in tensors.items()} for group, tensors in part.state.items()}
            add(name, rates.preserve[k] * by_member(partial(cost_of, part.term), state, {n: _wide(t) for n, t in part.values().items()}))
    return found


def _wide(x: Tensor) -> Tensor:
    """Return x in float64: sums then round alike however the tensors lie in memory, so that a resumed run records the same numbers."""
    return x.double() if x.is_floating_point() else x


def _first_batch(fleet: Fleet) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
    """Return the first batch of the epoch, x (F, B, …), and the outputs and activations for it, without a trace in the fleet."""
    step, stack, gates = fleet.step, fleet.stack, fleet.stack.gates
    x = step.data.batch(step.order[:, : fleet.run.batch], fleet.still)[0].to(step.dtype)
    for part in fleet.parts:
        part.close_gates(None, fleet.tasks)
    with evaluating(stack.module), step.precision():
        outputs = stack.forward(fleet.params, fleet.buffers, x)
    stack.gates = gates
    return x, outputs
