"""What the layers of every member read and return: inputs for preservers that project steps, activity for those that weigh nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfless.engine import rng
from selfless.engine.part import Part
from selfless.engine.stack import Tensors
from selfless.functional import reservoir
from selfless.importance.inputs import measure_inputs
from selfless.importance.nodes import Nodes
from selfless.network.calling import evaluating
from selfless.preserve.capabilities import ProjectsSteps, WeighsNodes

if TYPE_CHECKING:
    from selfless.engine.fleet import Fleet


@torch.no_grad()
def add_inputs(part: Part, fleet: Fleet, order: Tensor | None) -> None:
    """Run every member on samples of the task that has ended, and pass what its layers read to the preserver, if it projects steps.

    The samples are drawn by hashes of (seed, task), so they do not depend on the other members of a fleet. `order` are the rows of the
    samples (F, n), if a task draws them by weight; None: row i is sample i.
    """
    term, stack, data = part.term, fleet.stack, fleet.step.data
    if not isinstance(term, ProjectsSteps) or not term.is_on:
        return
    drawn = reservoir(rng.words(rng.stream_key(fleet.seeds, "inputs", fleet.tasks), data.n), term.samples)
    x, _ = data.batch(drawn if order is None else order.gather(1, drawn), fleet.still)
    wanted = {name for name in stack.trainable if term.reads_inputs(part.state, name)}
    found = []
    for m in range(fleet.size):
        stack.load_member(m, fleet.params, fleet.buffers)
        found.append(measure_inputs(stack.module, lambda m=m: stack.run_module(stack.module, x[m].float()), wanted))  # type: ignore[misc]
    part.add_inputs({name: torch.stack([f.moments[name] for f in found]) for name in found[0].moments}, found[0].others)


@torch.no_grad()
def add_activity(part: Part, fleet: Fleet, order: Tensor | None) -> None:
    """Run every member on all samples of the ended task, and pass the activity of its neurons to a preserver that weighs them."""
    term, stack, data = part.term, fleet.stack, fleet.step.data
    if not isinstance(term, WeighsNodes):
        return
    modules = {layer: stack.module.get_submodule(layer) for layer in term.places(part.state)}
    found: list[Tensors] = []
    for m in range(fleet.size):
        stack.load_member(m, fleet.params, fleet.buffers)
        with evaluating(stack.module), Nodes(modules) as nodes:
            for x, _ in data.passes(fleet.at_once(data, fleet.run.batch), fleet.still, order):
                stack.run_module(stack.module, x[m].float())
        found.append(nodes.means())
    part.add_activity({layer: torch.stack([one[layer] for one in found]) for layer in modules})
