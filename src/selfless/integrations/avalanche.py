"""`SelflessPlugin`: preservers and sparsifiers in an Avalanche strategy.

    plugin = SelflessPlugin(preserve=MAS(0.1), sparsify=SLNID(1e-3))
    strategy = Naive(model=model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), train_mb_size=128, plugins=[plugin])
    for experience in benchmark.train_stream:
        strategy.train(experience)

An experience is a task. Models may grow: new heads of a `MultiHeadClassifier` and new classes of an `IncrementalClassifier`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from selfless.importance.objectives import Loss
from selfless.integrations.attachment import Anchor, Attachment
from selfless.integrations.extras import missing
from selfless.keeper import Keeper
from selfless.network.layers import Layers
from selfless.preserve import State
from selfless.preserve.base import Preserver
from selfless.preserve.quadratic import Quadratic

try:
    from avalanche.benchmarks.scenarios import OnlineCLExperience
    from avalanche.models.utils import avalanche_forward
    from avalanche.training.plugins import SupervisedPlugin
except ImportError as error:
    raise missing("avalanche") from error


class SelflessPlugin(SupervisedPlugin):
    """Attach a keeper to the model of a strategy, add its penalty to the loss, and end a task after each experience.

    preserve, sparsify, layers   as in `selfless.attach`; **options too (heads, parameters, state_dtype, …)
    anchor   "implicit" or "explicit"
    loss     loss(output, batch) → one loss per sample, for EWC and IMM, if it is not the cross-entropy of labels
    """

    def __init__(
        self,
        preserve: Any = None,
        sparsify: Any = None,
        layers: Layers = "auto",
        *,
        anchor: Anchor = "implicit",
        loss: Loss | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.attachment = Attachment(anchor, None, loss, {"preserve": preserve, "sparsify": sparsify, "layers": layers} | options)
        self._evaluation = contextlib.ExitStack()

    @property
    def keeper(self) -> Keeper:
        """The keeper, from the first experience on."""
        return self.attachment.keeper

    # -------------------------------------------------------------------------------------------------------- hooks of Avalanche
    def before_training_exp(self, strategy: Any, **_: Any) -> None:
        """Attach; the model has its new heads and classes by now."""
        keeper = self.attachment.attach(strategy.model)
        parameters = dict(keeper.model.named_parameters())
        for part in keeper.parts:
            part.state = grown(part.term, part.state, parameters)
        self.attachment.anchor_with([strategy.optimizer])

    def before_training_epoch(self, strategy: Any, **_: Any) -> None:
        """Begin an epoch of the task; Avalanche counts epochs from 0 in each experience."""
        self.attachment.begin_epoch(strategy.clock.train_exp_epochs, strategy.train_epochs, len(strategy.dataloader))

    def before_backward(self, strategy: Any, **_: Any) -> None:
        """Add the penalty to the loss."""
        strategy.loss = strategy.loss + self.keeper.penalty(tuple(strategy.mbatch))

    def after_training_exp(self, strategy: Any, **_: Any) -> None:
        """End the task. In an online stream a task ends with the last piece of its experience."""
        experience = strategy.experience
        if isinstance(experience, OnlineCLExperience):
            if not experience.is_last_subexp:
                return
            experience = experience.origin_experience
        labels = set(experience.task_labels) if hasattr(experience, "task_labels") else set()
        forward = TaskForward(int(labels.pop()) if len(labels) == 1 else None)
        data = experience.dataset
        self.attachment.end_task(DataLoader(data, strategy.train_mb_size, collate_fn=getattr(data, "collate_fn", None)), forward)

    def before_eval_exp(self, strategy: Any, **_: Any) -> None:
        """Evaluate an experience that was learned with the parameters or gates that belong to it."""
        task = getattr(strategy.experience, "current_experience", None)
        if self.attachment.is_attached and task is not None and task < self.keeper.tasks:
            self._evaluation.enter_context(self.attachment.evaluating(task))

    def after_eval_exp(self, strategy: Any, **_: Any) -> None:
        """Go back to the parameters that are trained."""
        self._evaluation.close()


@dataclass(frozen=True)
class TaskForward:
    """Call a model on a batch (x, y, …, task labels) of Avalanche: with the head of one task, or with the labels of the batch."""

    task: int | None

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        x = batch[0]
        return avalanche_forward(model, x, batch[-1] if self.task is None else torch.full((len(x),), self.task, device=x.device))


def grown(term: Preserver, state: State, parameters: Mapping[str, Tensor]) -> State:
    """Return the state for parameters that have grown at their ends: new entries have no importance, and θ* is their current value.

    Other methods than those with a penalty Σ Ω(θ − θ*)² cannot use a head that grows; the keeper then raises an error.
    """
    if not isinstance(term, Quadratic):
        return state
    found = dict(state)
    for group in term.groups:
        for name, old in state[group.name].items() if group.like_parameter else ():
            now = parameters.get(name)
            if (
                now is None
                or now.shape == old.shape
                or now.dim() != old.dim()
                or any(a < b for a, b in zip(now.shape, old.shape, strict=True))
            ):
                continue
            larger = (
                now.detach().to(old.dtype).clone() if group.precision == "parameter" else now.detach().new_zeros(now.shape, dtype=old.dtype)
            )
            larger[tuple(slice(size) for size in old.shape)] = old.to(larger.device)
            found[group.name] = found[group.name] | {name: larger}
    return found
