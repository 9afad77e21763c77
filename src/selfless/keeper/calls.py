"""What a loop has called since the last task ended. `selfless.keeper.notices` says what was left out."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfless.functional.gaussian import is_ordinary
from selfless.keeper.ready import needs_penalty
from selfless.network.calling import Forward

if TYPE_CHECKING:
    from selfless.keeper.changes import Changes
    from selfless.keeper.keeper import Keeper


SAME = 1e-5  # sums over the same samples in another order differ by less
SEVERAL = 5  # so many penalties are those of a training loop


@dataclass
class Calls:
    """The calls and steps of the current task.

    penalty     keeper.penalty() was called; with inject=True, a backward pass was seen
    penalties   how often keeper.penalty() was called
    watched     a value of keeper.penalty() had a gradient
    reached     a backward pass reached such a value
    step        an optimizer took a step over the model's parameters
    optimizers  those that did, with the number of their parameters
    stepped     the ids of these parameters
    epoch       the epoch and the number of epochs of the last keeper.begin_epoch(); None if there was none
    resumed     the epoch in which a loaded state was saved, until keeper.begin_epoch(); None if no epoch had begun
    ended       the data with which the last task ended (`reference_to`); None before
    sums        Σα of each layer on that data, or ΣΩ if no layer was measured: the same data in another loader have the same
    follows     the task before had steps of an optimizer
    loaded      a state was loaded in this task, so that it may have had steps before
    evaluations how many blocks of keeper.evaluating() are open
    """

    penalty: bool = False
    penalties: int = 0
    watched: bool = False
    reached: bool = False
    step: bool = False
    optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = field(default_factory=weakref.WeakKeyDictionary)
    stepped: set[int] = field(default_factory=set)
    epoch: tuple[int, int] | None = None
    ended: weakref.ref[Any] | None = None
    sums: list[float] = field(default_factory=list)
    follows: bool = False
    loaded: bool = False
    resumed: tuple[int, int] | None = None
    evaluations: int = 0

    @property
    def is_fresh(self) -> bool:
        """Return True if the parameters should be those with which the last task of a training loop ended."""
        return self.follows and not self.step and not self.loaded

    @contextmanager
    def evaluating(self, inside: AbstractContextManager[nn.Module]) -> Iterator[nn.Module]:
        """Inside `with`: what `inside` gives, and no training."""
        self.evaluations += 1
        try:
            with inside as model:
                yield model
        finally:
            self.evaluations -= 1

    def watch(self, cost: Tensor) -> Tensor:
        """Return the value of keeper.penalty(); until a backward pass has reached one, note whether one does."""
        if not self.reached and cost.requires_grad and is_ordinary(cost):
            self.watched = True
            cost.register_hook(self._reach)
        return cost

    def _reach(self, gradient: Tensor) -> None:
        self.reached = True

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step over the model's parameters."""
        self.step = True
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if self.optimizers.get(optimizer) != size:
            self.optimizers[optimizer] = size
            self.stepped |= {id(p) for group in optimizer.param_groups for p in group["params"]}

    def _forgotten(self, parameters: Mapping[str, nn.Parameter], changes: Changes) -> list[str]:
        """Return the new parameters that got a gradient, but belong to no optimizer that took a step."""
        return [name for name, p in parameters.items() if p.grad is not None and id(p) not in self.stepped and changes.is_new(name, p)]

    def begin_epoch(self, epoch: int, epochs: int, keeper: Keeper) -> bool:
        """Note the epoch that begins; return True if it goes on, because a state that was saved in it was loaded.

        Warn if it is the first one again, after the last one. A task may be tried again from its start.
        """
        goes_on, self.resumed = self.resumed == (epoch, epochs), None
        comes_again = epoch == 0 and self.step and self.epoch is not None and self.epoch[0] + 1 == self.epoch[1]
        if comes_again and not keeper.changes.is_untouched(keeper.model):
            keeper.notices.warn_of_epochs()
        self.epoch = (epoch, epochs)
        return goes_on

    def check_training(self, what: str) -> None:
        """Raise RuntimeError inside `evaluating`, where that changes the model; "": nothing trains."""
        if self.evaluations and what:
            raise RuntimeError(
                f"{what} inside keeper.evaluating(): the model has the weights of an old task there, and what is trained is lost at the "
                "end of the block; leave the block first"
            )

    def check_end(
        self,
        keeper: Keeper,
        parameters: Mapping[str, nn.Parameter],
        forward: Forward | None,
        ended: weakref.ref[Any] | None,
        sums: Sequence[float],
    ) -> None:
        """Warn, when a task ends with the data `ended`, of calls and steps that it did not have."""
        keeper.notices.check_read(keeper, self.step)
        keeper.notices.note_forward(keeper.tasks, forward)
        if self.step:
            needed = [part for part in keeper.parts if needs_penalty(part, keeper.tasks, keeper.implicit)] if not self.penalty else None
            keeper.notices.check_calls(keeper.parts, needed, keeper.tasks, forward, self.epoch)
            if forgotten := self._forgotten(parameters, keeper.changes):
                keeper.notices.warn_of_forgotten(forgotten)
            if self.watched and not self.reached:
                keeper.notices.warn_of_lost_penalties(self.penalties)
        elif not self.loaded:
            trained = self.penalty  # steps may be taken by hand
            same = ended is not None and self.ended is not None and self.ended() is not None and self.ended() is ended()
            same = (same or self._has(sums)) and keeper.forwards[-1:] == [forward]
            untouched = self.penalties >= SEVERAL and keeper.changes.is_untouched(keeper.model)
            keeper.notices.check_no_step(keeper.parts, parameters, keeper.tasks, keeper.implicit, trained, same, untouched)
            if self.penalties >= SEVERAL and not untouched:
                keeper.notices.check_by_hand(keeper.parts, keeper.tasks)

    def _has(self, sums: Sequence[float]) -> bool:
        """Return True if the last task ended with these sums, apart from the order of its batches."""
        pairs = zip(sums, self.sums, strict=False)
        return len(sums) == len(self.sums) > 0 and all(a > 0 and math.isclose(a, b, rel_tol=SAME) for a, b in pairs)


def reference_to(batches: Any) -> weakref.ref[Any] | None:
    """Return a reference by which the same data are known again: to a loader, or to the first tensor of a list; None if there is none."""
    first = batches[0] if isinstance(batches, (list, tuple)) and batches else batches
    first = first[0] if isinstance(first, (list, tuple)) and first else first
    try:
        return weakref.ref(first)
    except TypeError:
        return None
