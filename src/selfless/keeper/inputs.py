"""What the layers read and returned in a task: inputs for preservers that project steps, activity for those that weigh nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from selfless.distributed import ALONE, Ranks
from selfless.importance.inputs import Inputs, draw_rows, measure_inputs
from selfless.importance.nodes import Nodes
from selfless.keeper.gates import wire
from selfless.network.calling import Forward, evaluating, run_batch, to_device, token_mask
from selfless.network.layers import Tap
from selfless.network.roles import PLAIN
from selfless.preserve.capabilities import ProjectsSteps, State, WeighsNodes


def add_inputs(
    model: nn.Module,
    term: ProjectsSteps,
    state: State,
    parameters: Mapping[str, Tensor],
    batches: Iterable[Any],
    forward: Forward | None,
    ranks: Ranks = ALONE,
) -> State:
    """Return the state after a task: run the model on some of its samples and pass what the layers read to the preserver.

    The samples are the first rows of every batch, as many as the preserver asks for in all. So the batches must be shuffled.
    Several ranks run an equal share of them each.
    """
    wanted = {name for name in parameters if term.reads_inputs(state, name)}
    found = Inputs()
    try:
        count = len(batches)  # type: ignore[arg-type]
    except TypeError:  # without a length, as an IterableDataset
        batches = list(batches)
        count = len(batches)
    for raw in draw_rows(batches, count, -(-term.samples // ranks.size)):
        batch = to_device(raw, model)
        found += measure_inputs(model, partial(run_batch, model, batch, forward), wanted, token_mask(batch))
    ranks.sum_([found.moments[name] for name in sorted(found.moments)])
    return term.trim(term.add_inputs(state, found.moments, found.others, parameters))


@torch.no_grad()
def add_activity(
    model: nn.Module,
    term: WeighsNodes,
    state: State,
    taps: Mapping[str, Tap],
    batches: Iterable[Any],
    forward: Forward | None,
    ranks: Ranks = ALONE,
) -> State:
    """Return the state after a task: run the model on all of its samples and pass the activity of the neurons to the preserver.

    The wiring is read again, because a head may have been added since the last task.
    """
    nodes = Nodes({name: tap.module for name, tap in taps.items()}, {name: tap.axis for name, tap in taps.items()})
    with evaluating(model), nodes:
        for batch in batches:
            run_batch(model, to_device(batch, model), forward)
    ranks.sum_([nodes.totals[layer] for layer in taps])
    nodes.counts = {layer: ranks.count(nodes.counts[layer], nodes.totals[layer].device) for layer in taps}
    return term.add_activity(term.wire(state, wire(model, taps)), nodes.means())


def moments_like(model: nn.Module, term: ProjectsSteps, state: State, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the size of what `add_inputs` measures, like `parameters`: (d, d) in float64 for each weight of a layer."""
    layers = {f"{n}.weight" if n else "weight" for n, m in model.named_modules() if isinstance(m, PLAIN)}
    return {
        name: torch.empty(p[0].numel(), p[0].numel(), dtype=torch.float64, device=p.device)
        for name, p in parameters.items()
        if name in layers and term.reads_inputs(state, name)
    }
