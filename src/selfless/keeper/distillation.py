"""Distillation in a training loop: compare the outputs of old heads with a teacher's on the current batch, and read the head's features."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from selfless.distributed import ALONE, Ranks
from selfless.distributed.reduction import NO_BATCHES
from selfless.functional.shapes import classes_last
from selfless.keeper.damping import Optimizers
from selfless.keeper.hook import Hook
from selfless.network.calling import (
    Forward,
    call_with,
    check_labels,
    check_shape,
    class_numbers,
    evaluating,
    labels_of,
    run_batch,
    to_device,
)
from selfless.preserve.base import widened
from selfless.preserve.capabilities import Distils, Encodes, Features, State

SEEN = 1e-4  # a cost that is smaller says little about its curvature


def distillation(model: nn.Module, term: Distils, state: State, forwards: Sequence[Forward | None], batch: Any) -> Tensor:
    """Return D: the penalty on the outputs of old tasks, given those of the teacher, summed over the different `forwards`."""
    if batch is None:
        raise RuntimeError(
            f"{type(term).__name__} compares outputs on the current batch: write keeper.penalty((x, y)), not keeper.penalty()"
        )
    batch = to_device(batch, model)
    labels = labels_of(batch)
    costs: list[Tensor] = []
    watched = model if isinstance(term, Encodes) else None
    for forward in dict.fromkeys(forwards):
        with torch.no_grad(), evaluating(model), HeadInput(watched) as before:
            teacher = call_with(model, term.teacher(state), batch, forward)
            if not len(teacher):
                raise ValueError(f"{type(term).__name__} got no samples, so its penalty is not defined; skip empty batches")
            teacher = term.classes_last(teacher, labels)
            term.check_outputs(teacher)
        with HeadInput(watched) as now, _frozen_statistics(model):
            costs.append(term.distil(term.classes_last(run_batch(model, batch, forward), labels), teacher))
        if isinstance(term, Encodes) and len(costs) == 1:  # only once, as all heads read the same features
            costs.append(term.code_drift(state, now.features, before.features))
    return torch.stack(costs).sum()


class Steepness:
    """Warn once if steps of SGD along ∇(λD) overshoot: if Σ_k s_k (∂λD/∂θ_k)²/(2λD) > 1 with the stable steps s_k of `sgd_steps`.

    It looks at calls 1, 2, 4, 8, 16, 32 and at every 64th, because each look is a backward pass, and waits for the device. It sees neither
    clipping nor a factor of the penalty, and not what adaptive optimizers do.

    is_on   False: it never looks
    """

    def __init__(self, is_on: bool) -> None:
        self._calls, self._is_over = 0, not is_on

    def look(self, what: str, cost: Tensor, parameters: Mapping[str, Tensor], optimizers: Optimizers | None) -> Tensor:
        """Return the cost λD, after a look; without `optimizers` nothing is known of the steps."""
        self._calls += 1
        is_due = not self._calls % 64 or self._calls in (1, 2, 4, 8, 16, 32)
        steps = optimizers.sgd_steps(parameters) if optimizers and is_due and not self._is_over and cost.requires_grad else {}
        if not steps or not bool(cost.detach() > SEEN):
            return cost
        found = torch.autograd.grad(cost, [parameters[name] for name in steps], retain_graph=True, allow_unused=True)
        parts = [step * g.float().square().sum() for step, g in zip(steps.values(), found, strict=True) if g is not None]
        self._is_over = bool(parts) and bool(torch.stack(parts).sum() > 2 * cost.detach())
        if self._is_over:
            warnings.warn(
                f"{what} is so strong that steps of SGD overshoot, so training may diverge: call keeper.anchor_with(optimizer), which "
                "keeps the steps of distillation short enough at any strength (not with damped=false), or take a smaller strength or "
                "learning rate",
                stacklevel=6,
            )
        return cost


def task_features(
    model: nn.Module, term: Encodes, batches: Iterable[Any], forward: Forward | None, ranks: Ranks = ALONE
) -> Iterator[Features]:
    """Cycle over the batches of a task; yield the features of the head and the task loss as a function of features.

    Several ranks all have the samples of each of them, so that they train the same encoder.
    """
    for raw in _cycle(batches) if ranks.is_alone else _cycle_together(batches, ranks, next(model.parameters()).device):
        batch = tree_map(lambda item: _all_rows(item, ranks), to_device(raw, model))
        labels = labels_of(batch)
        if labels is None:
            raise ValueError(f"{type(term).__name__} needs labels: call consolidate() with (x, y) pairs or dicts with 'labels'")
        with torch.no_grad(), evaluating(model), HeadInput(model) as head_input:
            labels = class_numbers(labels, "use a method that holds weights")
            output = classes_last(run_batch(model, batch, forward), labels)
            check_shape(labels, output)
            check_labels(labels, output.shape[-1])
        yield widened(head_input.features).unsqueeze(0), _loss_of_features(model, batch, labels, head_input.head, forward)


def _loss_of_features(
    model: nn.Module, batch: Any, labels: Tensor, head: nn.Module | None, forward: Forward | None
) -> Callable[[Tensor], Tensor]:
    """Return the task loss on a batch as a function of the features that its head reads."""

    def loss(features: Tensor) -> Tensor:
        assert head is not None
        with evaluating(model), HeadInput(model, (head, features[0])):
            output = classes_last(run_batch(model, batch, forward), labels)
        return F.cross_entropy(output.flatten(0, -2).to(features.dtype), labels.flatten())

    return loss


class HeadInput:
    """Inside `with`: the features that the head reads, which are the input of the last nn.Linear that runs.

    `network.roles.output_layer` is the one registered last; a model with several heads runs another one for each task.

    instead   (head, features): the features to replace its input with
    model     None: nothing is read
    """

    def __init__(self, model: nn.Module | None, instead: tuple[nn.Module, Tensor] | None = None) -> None:
        self.model, self.instead = model, instead
        self.head: nn.Module | None = None
        self._input: Tensor | None = None
        self._handles: list[Any] = []

    @property
    def features(self) -> Tensor:
        """The features, (M, N)."""
        if self._input is None:
            raise ValueError("no nn.Linear ran in the forward pass, so there is no head; use a model whose last layer is an nn.Linear")
        return self._input.flatten(0, -2)

    def __enter__(self) -> HeadInput:
        linear = [m for m in self.model.modules() if isinstance(m, nn.Linear)] if self.model is not None else []
        self._handles = [m.register_forward_pre_hook(Hook(self._read)) for m in linear]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _read(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Forward pre-hook of every nn.Linear: keep its input; replace that of the head."""
        self.head, self._input = module, inputs[0]
        if self.instead is not None and module is self.instead[0]:
            return (self.instead[1].view(inputs[0].shape).to(inputs[0].dtype), *inputs[1:])
        return None


@contextmanager
def _frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Inside `with`: batch normalisation does not update its running statistics, as this pass is not part of the training loop."""
    moving = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats]
    for module in moving:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in moving:
            module.track_running_stats = True


def _cycle_together(batches: Iterable[Any], ranks: Ranks, device: torch.device) -> Iterator[Any]:
    """Cycle over the batches of this rank. Raise ValueError on each rank if one of them has none, as the others would wait for it."""
    own = _cycle(batches)
    first = next(own, None)
    has_batches = [bool(n) for n in ranks.gather(torch.tensor(first is not None, device=device))]
    if not all(has_batches):
        raise ValueError(NO_BATCHES.format(rank=has_batches.index(False)))
    yield first
    yield from own


def _all_rows(item: Any, ranks: Ranks) -> Any:
    """Return the rows of a tensor on all ranks; anything else unchanged."""
    return torch.cat(ranks.gather_rows(item)) if isinstance(item, Tensor) and item.dim() and not ranks.is_alone else item


def _cycle(batches: Iterable[Any]) -> Iterator[Any]:
    """Cycle over the batches; stop at once if there are none."""
    while True:
        count = 0
        for count, batch in enumerate(batches, 1):  # noqa: B007
            yield batch
        if not count:
            return
