"""Learning without Forgetting: the old network's outputs on the new task's images are to stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selfless.preserve.base import Preserver, State, Tensors, counted, mine, widened
from selfless.terms import check_count, check_positive


@dataclass(frozen=True)
class LwF(Preserver):
    """Learning without Forgetting (Li & Hoiem, ECCV 2016): λ Σ_old heads KL(softmax(z*/T) ‖ softmax(z/T)), averaged over the batch.

    z* are the outputs of θ*, the network before the task, on the same images; T is `temperature`. The paper writes the cross-entropy,
    which has the same gradient and is not zero at θ*. Its old outputs are recorded once; here θ* is run again on each batch, which also
    fits augmented images. `warmup` epochs of each task after the first (never its last) train the new head alone, everything
    else as in θ* (the paper's warm-up; its length is not given there, none by default). A head that all tasks share is not new: then
    nothing is warmed up.
    """

    name: ClassVar[str] = "lwf"
    distils: ClassVar[bool] = True
    projects: ClassVar[bool] = True
    turns: ClassVar[bool] = True
    owns: ClassVar[bool] = True
    strength: float = 1.0
    temperature: float = 2.0
    warmup: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "temperature")
        check_count(self, "warmup")

    def init(self, parameters: Tensors) -> State:
        return {"anchor": {}, "held": {}, "head": {}, "count": counted(parameters)}

    def distil(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        """mean_m Σ_c p*_c (log p*_c − log p_c), p = softmax(z/T)."""
        log_p, log_old = (outputs.float() / self.temperature).log_softmax(-1), (teacher.float() / self.temperature).log_softmax(-1)
        return (log_old.exp() * (log_old - log_p)).sum(-1).mean()

    def turning(self, epoch: int, epochs: int) -> bool:
        return self.warmup > 0 and epoch in (0, self._warm(epochs))

    def _warm(self, epochs: int) -> int:
        """Epochs of the warm-up in a task of `epochs`: one is always left to learn everything in."""
        return min(self.warmup, epochs - 1)

    def turn(self, state: State, parameters: Tensors, epoch: int, epochs: int) -> tuple[State, dict[str, Tensor]]:
        """Hold what is not the new head during the warm-up, where there is a new head; let go after it."""
        new = {name for name in parameters if mine(state, name) is not None}
        if epoch >= self._warm(epochs) or not new or not state["anchor"]:
            return {**state, "held": {}}, {}
        # nothing is held in the first task, whose heads are all new: `anchor` is empty then
        held = {n: torch.ones_like(p, dtype=torch.bool) for n, p in parameters.items() if n in state["anchor"]}
        held |= {n: ~m for n in new & held.keys() if (m := mine(state, n)) is not None}
        return {**state, "held": held}, {}

    def project(self, state: State, parameters: Tensors) -> dict[str, Tensor]:
        return {n: torch.where(held, state["anchor"][n].to(parameters[n].dtype), parameters[n]) for n, held in state["held"].items()}

    def consolidate(self, state: State, parameters: Tensors, omega: Tensors) -> State:
        """θ* ← θ."""
        return {
            **state,
            "anchor": {name: widened(p) for name, p in parameters.items()},
            "held": {},
            "count": {"tasks": state["count"]["tasks"] + 1},
        }
