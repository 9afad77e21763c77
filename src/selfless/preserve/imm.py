"""Incremental Moment Matching: every task is trained to its own optimum, and the merger of all optima is evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from selfless.importance.objectives import Fisher
from selfless.preserve.base import COUNT, HEAD, Group, Splits, count_tasks, widened
from selfless.preserve.capabilities import Drops, Evaluates, KnowsHeads, State, Tensors
from selfless.preserve.quadratic import FisherObjectives, Quadratic
from selfless.terms import check_choice, check_positive


@dataclass(frozen=True)
class IMM(FisherObjectives, Quadratic, Drops, Evaluates, KnowsHeads):
    """Incremental Moment Matching (Lee et al., NIPS 2017). With θ_k the optimum of task k and F_k its Fisher information,

        merge="mean"   θ = 1/K Σ_k θ_k
        merge="mode"   θ = Σ_k F_k θ_k / Σ_k F_k       (approximately the mode of a mixture of Gaussians)

    The paper's three transfers:

        weight-transfer   a task starts from the optimum of the last task, not from the merger; always on
        L2-transfer       λ ‖θ − θ_{k−1}‖² in the loss, λ the strength; `imm:0` switches it off
        drop-transfer     dropout towards θ_{k−1}: in a training step each hidden node i is off with probability p = `drop`. It uses
                          θ̃_i = θ_{k−1,i} if it is off, else (θ_i − p θ_{k−1,i})/(1 − p), so that the mean of θ̃ is θ

    The merger is evaluated but never trained. All tasks have the same weight. `damping` is added to F, so that a parameter that no task
    needs is averaged. The head of a task comes from the optimum of that task. Nodes are those of hidden linear layers and convolutions;
    they are drawn once per step, for the whole batch. `alpha` is the option of EWC: α is the gradient of the "loss" or of the "function".
    """

    name: ClassVar[str] = "imm"
    later: ClassVar[Mapping[str, Any]] = {"alpha": "loss"}
    groups: ClassVar[tuple[Group, ...]] = (*Quadratic.groups, Group("merged"), Group("mass", precision="low"), HEAD, COUNT)
    splits: ClassVar[Splits] = "entries"
    auto_share: ClassVar[float | None] = None
    why_no_auto: ClassVar[str] = "its L2-transfer treats all parameters alike (Ω = 1)"
    strength: float = 1e-3
    merge: Literal["mean", "mode"] = "mode"
    fisher: Fisher = "empirical"
    damping: float = 1e-8
    drop: float = 0.0
    alpha: Literal["loss", "function"] = "loss"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "merge", ("mean", "mode"))
        check_choice(self, "fisher", ("empirical", "sampled", "exact"))
        check_choice(self, "alpha", ("loss", "function"))
        check_positive(self, "damping")
        if isinstance(self.drop, bool) or not isinstance(self.drop, (int, float)) or not 0 <= self.drop < 1:
            raise ValueError(f"IMM: drop is {self.drop!r}; it is the share of nodes turned off in a step, from 0 to below 1")

    @property
    def measures(self) -> bool:  # type: ignore[override]
        return self.merge == "mode"

    @property
    def drop_rate(self) -> float:
        return self.drop

    def drop_nodes(self, state: State, parameters: Tensors, off: Tensors) -> dict[str, Tensor]:
        """θ̃_i = θ_{k−1,i} if node i is off, else (θ_i − p θ_{k−1,i})/(1 − p)."""
        found = {}
        for name, is_off in off.items():
            if name not in state["anchor"]:
                continue  # the first task: there is no θ_{k−1}
            theta, before = parameters[name], state["anchor"][name].to(parameters[name].dtype)
            rows = is_off.view(-1, *[1] * (theta.dim() - 1))
            found[name] = torch.where(rows, before, (theta - self.drop * before) / (1 - self.drop))
        return found

    def init(self, parameters: Tensors) -> State:
        return {**super().init(parameters), "count": count_tasks(parameters)}

    def consolidate(self, state: State, parameters: Tensors, omega: Tensors) -> State:
        """θ̄ ← θ̄ + F/(ΣF + F)·(θ − θ̄), ΣF ← ΣF + F; F = 1 for the mean. For the L2-transfer θ* = θ, Ω = 1, and Ω = 0 in later heads."""
        merged, mass = dict(state["merged"]), dict(state["mass"])
        omegas, ended = {}, state["count"]["tasks"] + 1
        for name, p in parameters.items():
            theta = widened(p)
            weight = omega[name] + self.damping if self.merge == "mode" and name in omega else torch.ones_like(theta)
            head, others = state["head"].get(name), self.in_other_head(state, name)
            omegas[name] = torch.ones_like(theta) if head is None else (head < ended).to(theta.dtype)
            if others is not None:
                weight = torch.where(others, 0.0, weight)  # this task says nothing about the heads of other tasks
            if name not in merged:
                merged[name], mass[name] = theta, weight
                continue
            total = mass[name] + weight
            share = torch.where(total > 0, weight / total.clamp(min=torch.finfo(total.dtype).tiny), torch.ones_like(total))
            merged[name], mass[name] = torch.lerp(merged[name].to(total), theta.to(total), share), total
        return {
            **state,
            "omega": state["omega"] | omegas,
            "anchor": state["anchor"] | {name: widened(p) for name, p in parameters.items()},
            "merged": merged,
            "mass": mass,
            "count": {"tasks": ended},
        }

    def evaluated_parameters(self, state: State, parameters: Tensors, task: int) -> dict[str, Tensor]:
        return {name: value.to(parameters[name].dtype) for name, value in state["merged"].items() if name in parameters}

    def importance(self, state: State) -> Tensors | None:
        """Return None: the L2-transfer treats all parameters alike, and the merger changes all of them."""
        return None
