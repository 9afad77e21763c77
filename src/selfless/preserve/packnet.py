"""PackNet: each task keeps the largest of the weights that are still free, and no later task changes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selfless.preserve.base import COUNT, HEAD, Group, Preserver, count_tasks, widened
from selfless.preserve.capabilities import Evaluates, Freezes, KnowsHeads, Phased, Projects, State, Tensors


@dataclass(frozen=True)
class PackNet(Preserver, Evaluates, Freezes, KnowsHeads, Phased, Projects):
    """PackNet (Mallya & Lazebnik, CVPR 2018). With F_k the free weights of a layer when task k ends its training,

        K_k = the (1 − s)·|F_k| largest of F_k by magnitude, s the strength: the share that is pruned
        the others ← 0 and stay free; K_k is trained on for the rest of the task's epochs (`retrain`, a share of them), then frozen
        task u is evaluated with K_1 ∪ … ∪ K_u, every other weight 0

    so old tasks do not change at all: `project` puts frozen weights back after each step, whatever the optimizer did. Biases and other
    vectors are trained by the first task and frozen, as in the paper; a task's own head belongs to it whole. A head that all tasks share
    is packed like any layer (the paper always has a new head). Training and retraining share the run's epochs: the paper's 20 + 10 are
    `retrain` = 1/3. Without a second phase (one epoch, a loop that never calls `keeper.begin_epoch`, a plateau that stops early) pruning
    happens when the task ends, and nothing recovers from it. To evaluate a task one must know which task it is.
    """

    name: ClassVar[str] = "packnet"
    groups: ClassVar[tuple[Group, ...]] = (Group("owner"), Group("anchor"), Group("pruned"), HEAD, COUNT)
    by_task: ClassVar[bool] = True
    same_strength: ClassVar[bool] = True
    strength: float = 0.5
    retrain: float = 1 / 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strength >= 1:
            raise ValueError(f"PackNet: strength is {self.strength}; it is the share of free weights that is pruned, below 1")
        if not isinstance(self.retrain, (int, float)) or not 0 <= self.retrain < 1:
            raise ValueError(f"PackNet: retrain is {self.retrain!r}; it is the share of a task's epochs after pruning, from 0 to below 1")

    def init(self, parameters: Tensors) -> State:
        return {**super().init(parameters), "count": count_tasks(parameters)}

    def starts_phase(self, epoch: int, epochs: int) -> bool:
        return epoch == 0 or epoch == max(1, epochs - round(epochs * self.retrain))

    def begin_phase(self, state: State, parameters: Tensors, epoch: int, epochs: int) -> tuple[State, dict[str, Tensor]]:
        """At epoch 0 free weights start from 0, except in the first task. Later: prune, and train what is left."""
        if epoch == 0:
            begun = state["count"]["tasks"] > 0
            free = {n: self._free(state, n, p) & begun for n, p in parameters.items() if p.dim() > 1 and n in state["owner"]}
            return {**state, "pruned": {}}, {n: torch.where(f, 0.0, parameters[n]) for n, f in free.items()}
        pruned = {n: self._pruned(state, n, p) for n, p in parameters.items() if p.dim() > 1}
        return {**state, "pruned": pruned}, {n: torch.where(gone, 0.0, parameters[n]) for n, gone in pruned.items()}

    def project(self, state: State, parameters: Tensors) -> dict[str, Tensor]:
        """Frozen weights as they were, pruned ones 0."""
        right: dict[str, Tensor] = {}
        for name, owner in state["owner"].items():
            if name in parameters:
                right[name] = torch.where(owner > 0, state["anchor"][name].to(parameters[name].dtype), parameters[name])
        for name, gone in state["pruned"].items():
            right[name] = torch.where(gone, 0.0, right.get(name, parameters[name]))
        return right

    def consolidate(self, state: State, parameters: Tensors, omega: Tensors) -> State:
        """The free weights that were not pruned belong to this task from now on."""
        owner, anchor = dict(state["owner"]), dict(state["anchor"])
        task = state["count"]["tasks"] + 1
        for name, p in parameters.items():
            held = owner.get(name, torch.zeros_like(p, dtype=torch.int16))
            takes = (held == 0) & ~_mask(self.in_other_head(state, name), p)
            if p.dim() > 1:
                takes = takes & ~(state["pruned"][name] if name in state["pruned"] else self._pruned(state, name, p))
            owner[name] = torch.where(takes, task.to(torch.int16), held)
            anchor[name] = torch.where(held > 0, anchor.get(name, widened(p)), widened(p))
        return {**state, "owner": owner, "anchor": anchor, "pruned": {}, "count": {"tasks": task}}

    def evaluated_parameters(self, state: State, parameters: Tensors, task: int) -> dict[str, Tensor]:
        """K_1 ∪ … ∪ K_task, the rest 0."""
        return {
            name: torch.where((owner > 0) & (owner <= task + 1), state["anchor"][name], 0.0).to(parameters[name].dtype)
            for name, owner in state["owner"].items()
            if name in parameters
        }

    def importance(self, state: State) -> Tensors | None:
        """1 where a weight is taken, 0 where it is free."""
        return {name: (owner > 0).float() for name, owner in state["owner"].items()}

    def _free(self, state: State, name: str, p: Tensor) -> Tensor:
        """The weights of a layer that may be pruned: no task owns them, and they are not in a task's own head."""
        taken = state["owner"][name] > 0 if name in state["owner"] else torch.zeros_like(p, dtype=torch.bool)
        return ~taken & ~_mask(self.in_own_head(state, name), p) & ~_mask(self.in_other_head(state, name), p)

    def _pruned(self, state: State, name: str, p: Tensor) -> Tensor:
        """The ⌊s·|F|⌋ smallest of the free weights F."""
        free = self._free(state, name, p).flatten()
        size = torch.where(free, p.detach().abs().flatten(), torch.inf)
        rank = size.argsort(stable=True).argsort(stable=True)
        return ((rank < (free.sum() * self.strength).floor()) & free).view(p.shape)


def _mask(mask: Tensor | None, like: Tensor) -> Tensor:
    """Return the mask, or one that is False everywhere."""
    return torch.zeros_like(like, dtype=torch.bool) if mask is None else mask
