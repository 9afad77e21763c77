"""Gradient projection: a step changes a weight only across the inputs that its layer had in old tasks (GPM), or mostly so (SGP)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selfless.functional.shapes import wide
from selfless.functional.subspace import along, new_directions, pack, sizes_along
from selfless.preserve.base import COUNT, HEAD, Group, Preserver, count_tasks
from selfless.preserve.capabilities import ProjectsSteps, State, Tensors
from selfless.terms import check_count, check_not_negative, check_positive


@dataclass(frozen=True)
class GPM(Preserver, ProjectsSteps):
    """Gradient Projection Memory (Saha, Garg and Roy, ICLR 2021). A layer computes W x. Let C = Σ x xᵀ over `samples` samples of a task:

        M ← [M, V_k]   V_k the first k eigenvectors of (I − MMᵀ) C (I − MMᵀ), k the smallest so that M holds the share ε of tr C
        ΔW ← ΔW − ΔW MMᵀ   in every later step, so that the outputs W x of old tasks hardly change

    The strength is ε: 1 holds every direction that a sample had, 0 switches the method off. It grows by `rise` after every task (the paper
    has 0.97 and 0.003 on CIFAR-100); `first`, if given, is ε of the first layer (0.95 on permuted MNIST). x is a patch for a convolution.

    Biases, norms and any parameter that no linear layer or convolution owns are trained in their first task and held afterwards, as in the
    authors' code. The head of a task trains freely in its task and is held afterwards; a head that tasks share is a layer like any other.

    The step is projected, not the gradient. With SGD these are the same, also with momentum, because a step is linear in the gradients of
    its task. With Adam or weight decay the projected step still leaves W x unchanged, which a projected gradient would not.
    """

    name: ClassVar[str] = "gpm"
    is_weight: ClassVar[bool] = False
    groups: ClassVar[tuple[Group, ...]] = (*(Group(name, like_parameter=False) for name in ("basis", "scale", "held")), HEAD, COUNT)
    same_strength: ClassVar[bool] = True
    why_no_auto: ClassVar[str] = "its strength is a share of energy, which has no unit"
    strength: float = 0.97
    rise: float = 0.0
    first: float | None = None
    samples: int = 125

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "rise")
        check_positive(self, "first")
        check_count(self, "samples", 1)
        for field in ("strength", "first"):
            if (value := getattr(self, field)) is not None and value > 1:
                raise ValueError(f"{type(self).__name__}: {field} is {value}; it is a share of the energy of a layer's inputs, at most 1")

    def init(self, parameters: Tensors) -> State:
        return {**super().init(parameters), "count": count_tasks(parameters)}

    def add_inputs(self, state: State, moments: Tensors, others: Iterable[str], like: Tensors) -> State:
        if not self.is_on:
            return state
        basis, scale = dict(state["basis"]), dict(state["scale"])
        for i, (name, moment) in enumerate(moments.items()):
            empty = wide(like[name]).new_zeros(len(moment), 0)
            old, weights = basis.get(name, empty).to(empty), scale.get(name, empty[0]).to(empty)  # the model may have another precision now
            start = self.strength if self.first is None or i else self.first
            new, sizes = new_directions(old, moment, (start + self.rise * state["count"]["tasks"]).clamp(max=1.0))
            scales = self.new_scales(weights, sizes_along(old, moment), sizes)
            basis[name], scale[name] = pack(torch.cat([old, new], 1), scales)
        held = {name: torch.ones_like(state["count"]["tasks"]) for name in others}
        return {**state, "basis": basis, "scale": scale, "held": state["held"] | held}

    def new_scales(self, scale: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Return λ of the old and new directions, given λ of the old ones and the sizes of the task's inputs along both; 0 if not taken."""
        return torch.cat([scale, (new > 0).to(scale.dtype)])

    def trim(self, state: State) -> State:
        counts = {name: int((scale.reshape(-1, scale.shape[-1]) > 0).any(0).sum()) for name, scale in state["scale"].items()}
        cut = {group: {name: t[..., : counts[name]].clone() for name, t in state[group].items()} for group in ("basis", "scale")}
        return {**state, **cut}

    def project_step(self, state: State, before: Tensors, after: Tensors) -> dict[str, Tensor]:
        if not self.is_on:
            return {}
        right: dict[str, Tensor] = {name: before[name] for name in state["held"] if name in after}
        for name, basis in state["basis"].items():
            if name in after and name not in right:
                step = wide(after[name]) - wide(before[name])
                right[name] = (wide(after[name]) - along(step, basis.to(step), state["scale"][name].to(step))).to(after[name].dtype)
        for name, head in state["head"].items():
            if name in after:
                is_own, is_old = head == state["count"]["tasks"], (head >= 0) & (head < state["count"]["tasks"])
                right[name] = torch.where(is_own, after[name], torch.where(is_old, before[name], right.get(name, after[name])))
        return right

    def consolidate(self, state: State, parameters: Tensors, omega: Tensors) -> State:
        return {**state, "count": {"tasks": state["count"]["tasks"] + 1}}


@dataclass(frozen=True)
class SGP(GPM):
    """Scaled Gradient Projection (Saha and Roy, AAAI 2023): GPM in which a step may also go along the directions of old tasks, a little.

        ΔW ← ΔW − ΔW M diag(s) Mᵀ
        sᵢ ← min(1, sᵢ + (α + 1) σᵢ / (α σᵢ + max σ))   after each task, σ = √diag(MᵀCM) the size of its inputs along each direction

    s of a new direction starts from 0. `alpha` is the paper's α: at 0 s follows the size of the inputs, and α → ∞ is GPM.
    """

    name: ClassVar[str] = "sgp"
    strength: float = 0.97
    alpha: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "alpha")

    def new_scales(self, scale: Tensor, old: Tensor, new: Tensor) -> Tensor:
        sizes = torch.cat([old, new])
        grown = (self.alpha + 1) * sizes / (self.alpha * sizes + sizes.max()).clamp(min=torch.finfo(sizes.dtype).tiny)
        return (torch.cat([scale, torch.zeros_like(new)]) + grown).clamp(max=1.0)
