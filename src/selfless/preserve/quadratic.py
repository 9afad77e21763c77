"""Quadratic anchors: λ_Ω Σ_k Ω_k (θ_k − θ*_k)², with Ω from MAS, EWC or SI. The formula is in `selfless.functional.anchor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from selfless.functional import Anchor
from selfless.functional.shapes import wide
from selfless.importance import Estimator, Fisher, FunctionNorm, LayerNorms, LogLikelihood, Objective
from selfless.importance.objectives import is_by_layer
from selfless.preserve.base import Group, Preserver, Splits, widened
from selfless.preserve.capabilities import Anchored, Observes, State, Tensors
from selfless.terms import Strength, check_choice, check_positive


@dataclass(frozen=True)
class Quadratic(Preserver, Anchored):
    """A preserver with Ω and θ* by parameter name. Parameters that are added later are free (Ω = 0) until their first task ends."""

    groups: ClassVar[tuple[Group, ...]] = (Group("omega", precision="low"), Group("anchor", precision="parameter"))
    splits: ClassVar[Splits] = "entries"
    auto_share: ClassVar[float | None] = 60.0  # docs/lab-notes/auto.md: measured on five networks

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "penalty" in cls.__dict__ and "anchor" not in cls.__dict__ and cls.is_custom():
            raise TypeError(
                f"{cls.__name__} has its own penalty, but the implicit anchor of Quadratic would still use Ω(θ − θ*)²: "
                "subclass selfless.preserve.Preserver, or override anchor() too"
            )

    @property
    def step_kind(self) -> str:
        """Preservers that differ only in how Ω is measured, at the end of a task, share a fleet."""
        is_plain = self.measures and not (self.is_custom() or self.is_auto or isinstance(self, Observes) or is_by_layer(self.objective))
        return "Ω(θ − θ*)²" if is_plain else super().step_kind

    def anchor(self, state: State) -> Anchor:
        return Anchor(state["omega"], state["anchor"])

    def penalty(self, state: State, parameters: Tensors) -> Tensor:
        """Σ_k Ω_k (θ_k − θ*_k)²."""
        return self.anchor(state).value(parameters)

    def consolidate(self, state: State, parameters: Tensors, omega: Tensors) -> State:
        """Ω ← Ω + Ω_new, θ* ← θ."""
        old = state["omega"]
        return {
            **state,
            "omega": {name: omega[name] + old[name] if name in old else omega[name].clone() for name in omega}
            | {name: value for name, value in old.items() if name not in omega},
            "anchor": state["anchor"] | {name: widened(parameters[name]) for name in omega},
        }

    def auto_strength(self, state: State) -> Tensor:
        """λ = ρ / Σ_k Ω_k θ*_k²: with every parameter at 0, the penalty would be ρ."""
        size = torch.stack([(omega * wide(state["anchor"][name]).square()).sum() for name, omega in state["omega"].items()]).sum()
        return (self.share / size.clamp(min=torch.finfo(size.dtype).tiny)).float()

    def check_state(self, state: State) -> None:
        unpaired = sorted(state["omega"].keys() ^ state["anchor"].keys())
        if unpaired:
            raise ValueError(f"the state is incomplete: for {unpaired[0]!r} it has only one of Ω and θ*; load a complete state_dict")


@dataclass(frozen=True)
class MAS(Quadratic):
    """Memory Aware Synapses (Aljundi et al., ECCV 2018): Ω = mean_m |∂‖f(x_m)‖²/∂θ|, summed over tasks."""

    name: ClassVar[str] = "mas"
    measures: ClassVar[bool] = True
    strength: Strength = 0.1
    estimator: Estimator = "per-sample"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "estimator", ("per-sample", "per-batch"))


@dataclass(frozen=True)
class LocalMAS(Quadratic):
    """MAS in its local form (Aljundi et al., ECCV 2018, section 4.2): Ω of a layer is the importance for the output of that layer,

        Ω_ij = mean_m |∂‖y(x_m)‖²/∂θ_ij|,  y = act(θ x), with the input x held fixed;   with ReLU: mean_m 2 y_i x_j, Hebb's rule

    so no gradient flows between layers. y is the output of the layer after its activation; for the last layer, the output of the network.
    The paper drops the factor 2. It supports linear layers and convolutions, with or without normalisation after them.
    """

    name: ClassVar[str] = "mas-local"
    measures: ClassVar[bool] = True
    strength: Strength = 0.1

    @property
    def objective(self) -> Objective:
        return LayerNorms()


class FisherObjectives:
    """The objectives of EWC and IMM: Ω from log p(y|x), α from the same or, for `alpha="function"`, from ‖f‖²."""

    fisher: Fisher
    alpha: Literal["loss", "function"]

    @property
    def objective(self) -> Objective:
        return LogLikelihood(self.fisher)

    @property
    def alpha_objective(self) -> Objective | None:
        return FunctionNorm() if self.alpha == "function" else None


@dataclass(frozen=True)
class EWC(FisherObjectives, Quadratic):
    """Elastic Weight Consolidation (Kirkpatrick et al., PNAS 2017): Ω = mean_m (∂ log p(y_m|x_m)/∂θ)².

    `mode="online"` (Schwarz et al., 2018): Ω ← decay·Ω + Ω_new, θ* ← θ; with decay 1 that is the sum used by the paper.
    `mode="per-task"`: Σ_t Ω_t (θ − θ*_t)², where every task has its own anchor. A sum of parabolas is a parabola, so the state is only
    Ω = Σ Ω_t, θ* = Σ Ω_t θ*_t / Ω and a constant. Values and gradients are the same, for any number of tasks.
    `fisher` says where the labels come from: "empirical", "sampled" or "exact" (`selfless.importance.LogLikelihood`).
    `alpha` says which gradient α is (SLNID and SNID inhibit neurons with a large α less): "loss" as in the paper, which is almost 0 once a
    task is learned; or "function", ‖f‖² as in MAS, with one more backward pass at the end of a task.
    """

    name: ClassVar[str] = "ewc"
    groups: ClassVar[tuple[Group, ...]] = (*Quadratic.groups, Group("offset", like_parameter=False))
    splits: ClassVar[Splits] = "entries"
    measures: ClassVar[bool] = True
    later: ClassVar[Mapping[str, Any]] = {"alpha": "loss"}
    strength: Strength = 10.0
    mode: Literal["online", "per-task"] = "online"
    decay: float = 1.0
    fisher: Fisher = "empirical"
    estimator: Estimator = "per-sample"
    alpha: Literal["loss", "function"] = "loss"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "mode", ("online", "per-task"))
        check_choice(self, "alpha", ("loss", "function"))
        check_choice(self, "fisher", ("empirical", "sampled", "exact"))
        check_choice(self, "estimator", ("per-sample", "per-batch"))
        check_positive(self, "decay")

    @property
    def step_kind(self) -> str:
        return super().step_kind if self.mode == "online" else repr(self.without_strength)  # `offset` is part of the penalty

    @property
    def works_on_shards(self) -> bool:
        return self.mode == "online"  # `offset` is a sum over all entries

    def penalty(self, state: State, parameters: Tensors) -> Tensor:
        value = super().penalty(state, parameters)
        return value + torch.stack(list(state["offset"].values())).sum() if state["offset"] else value

    def consolidate(self, state: State, parameters: Tensors, omega: Tensors) -> State:
        """Online: Ω ← decay·Ω + Ω_new, θ* ← θ. Per task: Ω ← Ω + Ω_new, θ* ← the minimum of the sum of parabolas."""
        if self.mode == "online":
            faded = state["omega"] if self.decay == 1 else {name: self.decay * value for name, value in state["omega"].items()}
            return super().consolidate({**state, "omega": faded}, parameters, omega)
        new = super().consolidate(state, parameters, omega)
        offset = dict(state["offset"])
        for name in (name for name in omega if name in state["omega"]):  # in a fixed order: offsets are summed
            a, b, total = state["anchor"][name], new["anchor"][name], new["omega"][name]
            share = torch.where(total > 0, omega[name] / total.clamp(min=torch.finfo(total.dtype).tiny), torch.ones_like(total))
            new["anchor"][name] = torch.lerp(a, b, share)
            # Ω₁(θ−a)² + Ω₂(θ−b)² = (Ω₁+Ω₂)(θ−θ*)² + Ω₁Ω₂/(Ω₁+Ω₂)·(a−b)²
            constant = (state["omega"][name] * share * (a - b).square()).sum()
            offset[name] = offset.get(name, torch.zeros_like(constant)) + constant
        return new | {"offset": offset}


@dataclass(frozen=True)
class OnlineEWC(EWC):
    """Online EWC (Schwarz et al., ICML 2018): `EWC` in which the Ω of old tasks decays, Ω ← decay·Ω + Ω_new, θ* ← θ."""

    name: ClassVar[str] = "ewc-online"
    decay: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode != "online":
            raise ValueError(
                f"OnlineEWC has one decaying Ω for all tasks, so mode={self.mode!r} is not possible; use EWC(mode={self.mode!r})"
            )


@dataclass(frozen=True)
class SI(Quadratic, Observes):
    """Synaptic Intelligence (Zenke et al., ICML 2017), "Path Integral": Ω += max(0, ω) / (Δθ² + ξ), ω = −Σ_steps g·dθ.

    g is the gradient of the **task loss** alone, without that of the penalties. ξ is `damping`.
    """

    name: ClassVar[str] = "si"
    groups: ClassVar[tuple[Group, ...]] = (*Quadratic.groups, Group("path", changes_in_step=True), Group("start", precision="parameter"))
    splits: ClassVar[Splits] = "entries"
    strength: Strength = 1.0
    damping: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "damping")

    def init(self, parameters: Tensors) -> State:
        start = {name: widened(p) for name, p in parameters.items()}
        return {"omega": {}, "anchor": {}, "path": {n: torch.zeros_like(t) for n, t in start.items()}, "start": start}

    def start_path(self, state: State, parameters: Tensors) -> State:
        return {**state, "start": {name: widened(p) for name, p in parameters.items()}}

    def observe(self, state: State, before: Tensors, after: Tensors, gradients: Tensors) -> State:
        """ω ← ω − g·dθ."""
        path = dict(state["path"])
        for name, g in gradients.items():
            change = (after[name] - before[name]).to(g.dtype)
            path[name] = path[name] - g * change if name in path else -g * change
        start = state["start"] | {n: widened(before[n]) for n in gradients if n not in state["start"]}
        return {**state, "path": path, "start": start}

    def consolidate(self, state: State, parameters: Tensors, omega: Tensors) -> State:
        """Ω ← Ω + max(0, ω) / (Δθ² + ξ), θ* ← θ; start a new path."""
        measured = {}
        for name, p in parameters.items():
            distance = widened(p) - state["start"].get(name, widened(p))
            measured[name] = state["path"].get(name, torch.zeros_like(distance)).clamp(min=0) / (distance.square() + self.damping)
        new = super().consolidate(state, parameters, measured)
        restart = self.init(parameters)
        return {**new, "path": restart["path"], "start": restart["start"]}
