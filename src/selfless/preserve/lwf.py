"""Learning without Forgetting: keep the old network's outputs on the new task's images."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from selfless.functional.shapes import classes_last, has_known_classes, wide
from selfless.preserve.base import COUNT, CURVATURE, HEAD, Group, Preserver, Splits, count_tasks, widened
from selfless.preserve.capabilities import Distils, Holds, KnowsHeads, Phased, State, Tensors
from selfless.terms import Strength, check_count, check_positive


@dataclass(frozen=True)
class LwF(Preserver, Distils, Holds, KnowsHeads, Phased):
    """Learning without Forgetting (Li & Hoiem, ECCV 2016): λ Σ_old heads KL(softmax(z*/T) ‖ softmax(z/T)), averaged over the batch.

    z* are the outputs of θ*, the network before the task, on the same images; T is `temperature`. The paper uses the cross-entropy, which
    has the same gradient but is not zero at θ*. The paper computes old outputs once. Here θ* runs on every batch, which also works with
    augmented images. In each task after the first, `warmup` epochs (never the last epoch) train the new head alone, while all other
    parameters stay at θ*. The paper has this warm-up but does not give its length; the default is 0. A head that all tasks share is not
    new, so it has no warm-up.

    `damped` limits λ in every step so that no strength diverges (`selfless.functional.damping`); false uses the plain gradient of λ. In a
    loop this needs `keeper.anchor_with(optimizer)`, because the limit depends on the learning rate.
    """

    name: ClassVar[str] = "lwf"
    groups: ClassVar[tuple[Group, ...]] = (Group("anchor", precision="parameter"), Group("held"), HEAD, COUNT, CURVATURE)
    later: ClassVar[Mapping[str, Any]] = {"damped": False}
    splits: ClassVar[Splits] = "entries"
    strength: Strength = 1.0
    temperature: float = 2.0
    warmup: int = 0
    damped: bool = True

    def __post_init__(self) -> None:
        if self.strength == "auto":  # the divergence has the unit of the loss already
            object.__setattr__(self, "strength", 1.0)
        super().__post_init__()
        check_positive(self, "temperature")
        check_count(self, "warmup")

    def init(self, parameters: Tensors) -> State:
        zero = torch.zeros_like(next(iter(parameters.values())).detach().flatten()[0], dtype=torch.float32)
        return {**super().init(parameters), "count": count_tasks(parameters), "curvature": {"largest": zero} if self.damped else {}}

    def teacher(self, state: State) -> Tensors:
        """θ*, the network before the task."""
        return state["anchor"]

    def classes_last(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        """Move the classes of (M, C, H, W) to the last axis if labels are (M, H, W). Warn of outputs that seem to have no classes."""
        name = type(self).__name__
        if not outputs.requires_grad and outputs.shape[-1] > 1 and labels is not None and _are_no_probabilities(labels, outputs):
            warnings.warn(
                f"{name} compares the probabilities of classes, but these labels have the shape of the output and are no probabilities: "
                "for regression or several labels it holds nothing useful. Use a method that holds weights, such as MAS",
                stacklevel=2,
            )
        if not has_known_classes(outputs, labels):
            warnings.warn(
                f"{name} takes the last axis of the output {tuple(outputs.shape)} as the classes; if they are on axis 1, write "
                "keeper.penalty((x, y)) with labels that have the shape of the other axes",
                stacklevel=2,
            )
        return outputs if labels is None else classes_last(outputs, labels)

    def check_outputs(self, outputs: Tensor) -> None:
        """Refuse one output: its softmax is always 1."""
        if outputs.shape[-1] == 1:
            raise ValueError(
                f"{type(self).__name__} compares the probabilities of classes, and this head has one output, whose softmax is always 1: it "
                "would hold nothing. For regression or a single logit use a method that holds weights, such as MAS"
            )

    def distil(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        """mean_m Σ_c p*_c (log p*_c − log p_c), p = softmax(z/T)."""
        log_p, log_old = ((wide(z) / self.temperature).log_softmax(-1) for z in (outputs, teacher))
        return (log_old.exp() * (log_old - log_p)).sum(-1).mean()

    def warms_up(self, task: int) -> bool:
        return self.warmup > 0 and task > 0

    def without_warmup(self) -> LwF:
        return replace(self, warmup=0)

    def starts_phase(self, epoch: int, epochs: int) -> bool:
        return self.warmup > 0 and epoch in (0, self._warmup_epochs(epochs))

    def _warmup_epochs(self, epochs: int) -> int:
        """Return the length of the warm-up in a task of `epochs`: at least one epoch trains all parameters."""
        return min(self.warmup, epochs - 1)

    def begin_phase(self, state: State, parameters: Tensors, epoch: int, epochs: int) -> tuple[State, dict[str, Tensor]]:
        """During the warm-up hold all parameters but the new head at θ*, if there is a new head; afterwards release them."""
        new = {name for name in parameters if self.in_own_head(state, name) is not None}
        if epoch >= self._warmup_epochs(epochs) or not new or not state["anchor"]:
            return {**state, "held": {}}, {}
        masks = {n: torch.ones_like(p, dtype=torch.bool) for n, p in parameters.items() if n in state["anchor"]}
        masks |= {n: ~m for n in new & masks.keys() if (m := self.in_own_head(state, n)) is not None}
        return {**state, "held": masks}, {}

    def held(self, state: State) -> dict[str, tuple[Tensor, Tensor]]:
        """The warm-up holds parameters at θ*."""
        return {n: (mask, state["anchor"][n]) for n, mask in state["held"].items()}

    def consolidate(self, state: State, parameters: Tensors, omega: Tensors) -> State:
        """θ* ← θ."""
        return {
            **state,
            "anchor": state["anchor"] | {name: widened(p) for name, p in parameters.items()},
            "held": {},
            "count": {"tasks": state["count"]["tasks"] + 1},
        }


def _are_no_probabilities(labels: Tensor, outputs: Tensor) -> bool:
    """Return True for numbers of the shape of the outputs whose rows do not add up to 1, nor are empty."""
    if not labels.is_floating_point() or labels.shape != outputs.shape:
        return False
    sums = labels.float().sum(-1)
    return not bool((((sums - 1).abs() < 0.05) | (sums == 0)).all())
