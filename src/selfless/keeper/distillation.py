"""What LwF and EBLL ask of a model in somebody's loop: old outputs beside new ones on the batch at hand, and the features a head reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfless.keeper.hook import Hook
from selfless.network.calling import Forward, called_with, evaluating, labels_of, run_batch, to_device
from selfless.preserve import Preserver, State
from selfless.preserve.base import widened


def unwarmed(preserve: Preserver, state: State, turned: bool, forward: Forward | None) -> str:
    """Why a task after the first was not warmed up although its preserver would, and the remedy; nothing where all is well. A head that all
    tasks share, which needs no `forward`, is not new."""
    heads = bool(state.get("head"))
    if not getattr(preserve, "warmup", 0) or (heads and turned) or not (heads or forward):
        return ""
    remedy = "call keeper.turn(epoch, epochs) before every epoch" if heads else "name the heads of the tasks: attach(…, heads=[…])"
    return f"{type(preserve).__name__} warms up the head of a new task, and this task's was not: {remedy}, or set warmup=0"


def distillation(model: nn.Module, preserve: Preserver, state: State, forwards: Sequence[Forward | None], batch: Any) -> Tensor:
    """Σ over the ways in which old tasks were run: their outputs beside those of θ*."""
    if batch is None:
        raise RuntimeError(
            f"{type(preserve).__name__} compares old outputs on the batch at hand: write keeper.penalty((x, y)), not keeper.penalty()"
        )
    batch = to_device(batch, model)
    costs: list[Tensor] = []
    read = model if preserve.encodes else None
    for forward in dict.fromkeys(forwards):
        with torch.no_grad(), evaluating(model), HeadInput(read) as before:
            teacher = called_with(model, state["anchor"], batch, forward)
        with HeadInput(read) as now, _statistics_kept(model):
            costs.append(preserve.distil(run_batch(model, batch, forward), teacher))
        if preserve.encodes and len(costs) == 1:  # once: all heads read the same features
            costs.append(preserve.code_drift(state, now.features, before.features))
    return torch.stack(costs).sum()


def coded(
    model: nn.Module, preserve: Preserver, batches: Iterable[Any], forward: Forward | None
) -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """The features of a task's batches, over and over, and its loss with others in their place."""
    for given in _over_and_over(batches):
        batch = to_device(given, model)
        labels = labels_of(batch)
        if labels is None:
            raise ValueError(f"{type(preserve).__name__} needs labels: consolidate with (x, y) pairs or dicts with 'labels'")
        with torch.no_grad(), evaluating(model), HeadInput(model) as read:
            run_batch(model, batch, forward)

        def loss(made: Tensor, batch: Any = batch, y: Tensor = labels, head: nn.Module | None = read.head) -> Tensor:
            assert head is not None
            with evaluating(model), HeadInput(model, (head, made[0])):
                output = run_batch(model, batch, forward)
            return F.cross_entropy(output.flatten(0, -2).to(made.dtype), y.flatten())

        yield widened(read.features).unsqueeze(0), loss


class HeadInput:
    """Within `with`: what the last nn.Linear of a forward pass was given, the features that the head reads; or `instead` in its place.
    Without a model nothing is looked at."""

    def __init__(self, model: nn.Module | None, instead: tuple[nn.Module, Tensor] | None = None) -> None:
        self.model, self.instead = model, instead
        self.head: nn.Module | None = None
        self._given: Tensor | None = None
        self._handles: list[Any] = []

    @property
    def features(self) -> Tensor:
        """(M, N)."""
        if self._given is None:
            raise ValueError("no nn.Linear ran in the forward pass, so there is no head whose input could be coded")
        return self._given.flatten(0, -2)

    def __enter__(self) -> HeadInput:
        linear = [m for m in self.model.modules() if isinstance(m, nn.Linear)] if self.model is not None else []
        self._handles = [m.register_forward_pre_hook(Hook(self._seen)) for m in linear]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _seen(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self.head, self._given = module, inputs[0]
        if self.instead is not None and module is self.instead[0]:
            return (self.instead[1].view(inputs[0].shape).to(inputs[0].dtype), *inputs[1:])
        return None


@contextmanager
def _statistics_kept(model: nn.Module) -> Iterator[None]:
    """Running statistics of batch normalisation are not moved by a pass that the loop did not make."""
    moving = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats]
    for module in moving:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in moving:
            module.track_running_stats = True


def _over_and_over(batches: Iterable[Any]) -> Iterator[Any]:
    """For ever; of no batches, none."""
    while True:
        count = 0
        for count, batch in enumerate(batches, 1):  # noqa: B007
            yield batch
        if not count:
            return
