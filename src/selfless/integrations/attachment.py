"""The keeper of a callback or plugin: it is attached as soon as the model is known, and its state may be loaded before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from selfless.importance.objectives import Loss
from selfless.keeper import Keeper, attach
from selfless.network.calling import Forward, unwrap
from selfless.preserve.capabilities import Gated, Phased

Anchor = Literal["implicit", "explicit"]
PREFIX = "selfless/"  # of the names in a log


class Attachment:
    """Settings of a keeper, and the keeper once there is a model.

    anchor    "implicit": after each step of an optimizer, stable at any strength; "explicit": a gradient, as in the papers
    forward   forward(model, batch) → output, and
    loss      loss(output, batch) → one loss per sample: as in `keeper.consolidate`
    options   those of `selfless.attach`
    """

    def __init__(self, anchor: Anchor, forward: Forward | None, loss: Loss | None, options: Mapping[str, Any]) -> None:
        if anchor not in ("implicit", "explicit"):
            raise ValueError(f"anchor is {anchor!r}; choose 'implicit' or 'explicit'")
        self.anchor, self.forward, self.loss, self.options = anchor, forward, loss, dict(options)
        self._keeper: Keeper | None = None
        self._loaded: Mapping[str, Tensor] | None = None  # a state that waits for a model
        self._forwards: Sequence[Forward | None] = ()  # of the tasks that have ended
        self._first_epoch: int | None = None  # the epoch of the trainer at which this task began

    @property
    def is_attached(self) -> bool:
        """True if there is a keeper."""
        return self._keeper is not None

    @property
    def keeper(self) -> Keeper:
        """The keeper; there is none before the first training step."""
        if self._keeper is None:
            raise RuntimeError("there is no keeper yet: it is attached to the model when training begins")
        return self._keeper

    def attach(self, model: nn.Module) -> Keeper:
        """Attach to the model, or return the keeper that it has. The keeper of another model is detached, and its state moves here."""
        before = self._keeper
        if before is None or before.model is not unwrap(model):
            self._keeper = attach(model, **self.options)
            self._keeper.notices.silence_epochs()
            if before is not None:
                self._keeper.load_state_dict(before.state_dict(), before.forwards)
                before.detach()
        if self._loaded is not None:
            self.load(self._loaded)
        return self.keeper

    def anchor_with(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Use the implicit anchor, with the step sizes of these optimizers; an optimizer without a parameter of the model is left out."""
        own = {p for p in self.keeper.model.parameters() if p.requires_grad}
        found = [o for o in optimizers if any(p in own for group in o.param_groups for p in group["params"])]
        if not found:
            raise ValueError("no optimizer has a trainable parameter of the model that the keeper is attached to; attach to another module")
        for optimizer in found if self.anchor == "implicit" else ():
            self.keeper.anchor_with(optimizer)

    def begin_epoch(self, epoch: int, epochs: float | None, batches: float | None, first: int | None = None) -> None:
        """Begin an epoch of the trainer.

        epochs   where it will stop; None if it does not know
        first    the epoch in which the task began; None if it begins with the first call, as a trainer may count over all tasks
        """
        self._first_epoch = self._first_epoch if self._first_epoch is not None else epoch if first is None else first
        if epochs is not None and math.isfinite(epochs) and epochs > epoch:
            count = int(batches) if batches is not None and math.isfinite(batches) else None
            self.keeper.begin_epoch(epoch - self._first_epoch, int(epochs) - self._first_epoch, batches=count)
        elif any(isinstance(part.term, Phased | Gated) for part in self.keeper.parts):
            raise ValueError(f"{self.keeper.preserve} has phases within a task, which need a number of epochs; give the trainer one")

    def end_task(self, batches: Iterable[Any], forward: Forward | None = None) -> None:
        """Measure importances on the batches of the task that has ended, and begin the next one. `forward`: for this task alone."""
        self.keeper.consolidate(batches, forward or self.forward, loss=self.loss)
        self._first_epoch, self._forwards = None, list(self.keeper.forwards)

    def evaluating(self, task: int) -> AbstractContextManager[nn.Module]:
        """Inside `with`: the model as task `task`, counted from 0, is evaluated. PackNet, HAT and IMM need it."""
        return self.keeper.evaluating(task)

    def log(self) -> dict[str, float]:
        """Return `keeper.log()` with prefixed names."""
        return {f"{PREFIX}{name}": value for name, value in self.keeper.log().items()}

    def state(self) -> dict[str, Tensor]:
        """Return the state as named tensors; {} before there is a keeper."""
        waiting = {} if self._loaded is None else dict(self._loaded)
        found = waiting if self._keeper is None else self._keeper.state_dict()
        return found if not found or self._first_epoch is None else found | {"first_epoch": torch.tensor(self._first_epoch)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load a `state`, now or as soon as there is a model, which must have its weights by then."""
        if self._keeper is None:
            self._loaded = state
            return
        first = state.get("first_epoch")
        self._first_epoch = None if first is None else int(first)
        forwards = self._forwards or (None if self.forward is None else [self.forward] * int(state["tasks"]))
        self._keeper.load_state_dict({name: t for name, t in state.items() if name != "first_epoch"}, forwards)
        self._loaded = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy or pickle has the state of the keeper, and attaches to a model when it gets one."""
        return self.__dict__ | {"_keeper": None, "_loaded": self.state() or None}
