"""PackNet: each task keeps the largest of the free weights, and no later task changes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selfless.preserve.base import COUNT, HEAD, Group, Preserver, Splits, count_tasks, widened
from selfless.preserve.capabilities import Evaluates, Freezes, Holds, KnowsHeads, Phased, State, Tensors


@dataclass(frozen=True)
class PackNet(Preserver, Evaluates, Freezes, Holds, KnowsHeads, Phased):
    """PackNet (Mallya & Lazebnik, CVPR 2018). Let F_k be the free weights of a layer when task k is pruned:

        K_k = the (1 − s)·|F_k| weights of F_k with the largest magnitude; the strength s is the share that is pruned
        the pruned weights become 0 and stay free; K_k is trained for the rest of the epochs (a share `retrain` of them), then frozen
        task u is evaluated with K_1 ∪ … ∪ K_u and 0 for every other weight

    Old tasks do not change at all: `project` resets frozen weights after each step, whatever the optimizer did. As in the paper, the
    first task trains biases and other vectors, and they are frozen afterwards. The head of a task belongs to that task completely. A head
    that all tasks share is treated like any layer (the paper always has a new head). Training and retraining share the epochs of the run:
    the paper's 20 + 10 epochs are `retrain` = 1/3. Without a second phase (one epoch, a loop that never calls `keeper.begin_epoch`, a
    plateau that stops early) the weights are pruned when the task ends and not retrained. Evaluating an image requires knowing its task.
    """

    name: ClassVar[str] = "packnet"
    is_weight: ClassVar[bool] = False
    groups: ClassVar[tuple[Group, ...]] = (Group("owner"), Group("anchor", precision="parameter"), Group("pruned"), HEAD, COUNT)
    splits: ClassVar[Splits] = "parameters"
    by_task: ClassVar[bool] = True
    same_strength: ClassVar[bool] = False  # `_smallest_free` reads the strength, as a number or as a tensor
    why_no_auto: ClassVar[str] = "its strength is the share of weights that is pruned, which has no unit"
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
        """At epoch 0 set the free weights to 0, except in the first task. At the later epoch prune; the other weights train on."""
        if epoch == 0:
            is_later_task = state["count"]["tasks"] > 0
            free = {n: self._free(state, n, p) & is_later_task for n, p in parameters.items() if p.dim() > 1 and n in state["owner"]}
            return {**state, "pruned": {}}, {n: torch.where(f, 0.0, parameters[n]) for n, f in free.items()}
        pruned = {n: self._smallest_free(state, n, p) for n, p in parameters.items() if p.dim() > 1}
        return {**state, "pruned": pruned}, {n: torch.where(mask, 0.0, parameters[n]) for n, mask in pruned.items()}

    def held(self, state: State) -> dict[str, tuple[Tensor, Tensor]]:
        """Frozen weights are held at θ*, pruned ones at 0."""
        found = {name: (owner > 0, state["anchor"][name]) for name, owner in state["owner"].items()}
        for name, pruned in state["pruned"].items():
            frozen, value = found.get(name, (pruned, torch.zeros_like(pruned, dtype=torch.float32)))
            found[name] = frozen | pruned, torch.where(pruned, 0.0, value)
        return found

    def consolidate(self, state: State, parameters: Tensors, omega: Tensors) -> State:
        """Give the free weights that were not pruned to this task, and freeze them."""
        owner, anchor = dict(state["owner"]), dict(state["anchor"])
        task = state["count"]["tasks"] + 1
        for name, p in parameters.items():
            old = owner.get(name, torch.zeros_like(p, dtype=torch.int16))
            is_new = (old == 0) & ~_mask(self.in_other_head(state, name), p)
            if p.dim() > 1:
                is_new = is_new & ~(state["pruned"][name] if name in state["pruned"] else self._smallest_free(state, name, p))
            owner[name] = torch.where(is_new, task.to(torch.int16), old)
            anchor[name] = torch.where(old > 0, anchor.get(name, widened(p)), widened(p))
        return {**state, "owner": owner, "anchor": anchor, "pruned": {}, "count": {"tasks": task}}

    def evaluated_parameters(self, state: State, parameters: Tensors, task: int) -> dict[str, Tensor]:
        """Return the weights of K_1 ∪ … ∪ K_task, and 0 elsewhere."""
        return {
            name: torch.where((owner > 0) & (owner <= task + 1), state["anchor"][name], 0.0).to(parameters[name].dtype)
            for name, owner in state["owner"].items()
            if name in parameters
        }

    def importance(self, state: State) -> Tensors | None:
        """1 where a task owns the weight, 0 where it is free."""
        return {name: (owner > 0).float() for name, owner in state["owner"].items()}

    def _free(self, state: State, name: str, p: Tensor) -> Tensor:
        """Return a mask of the weights that may be pruned: no task owns them, and they are not in the head of a single task."""
        taken = state["owner"][name] > 0 if name in state["owner"] else torch.zeros_like(p, dtype=torch.bool)
        return ~taken & ~_mask(self.in_own_head(state, name), p) & ~_mask(self.in_other_head(state, name), p)

    def _smallest_free(self, state: State, name: str, p: Tensor) -> Tensor:
        """Return a mask of the ⌊s·|F|⌋ smallest of the free weights F."""
        free = self._free(state, name, p).flatten()
        size = torch.where(free, p.detach().abs().flatten(), torch.inf)
        rank = size.sort(stable=True).indices.sort(stable=True).indices  # vmap of torch 2.4 has no argsort
        return ((rank < (free.sum() * self.strength).floor()) & free).view(p.shape)


def _mask(mask: Tensor | None, like: Tensor) -> Tensor:
    """Return the mask, or for None a mask that is False everywhere."""
    return torch.zeros_like(like, dtype=torch.bool) if mask is None else mask
