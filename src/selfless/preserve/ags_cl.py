"""AGS-CL: hold the incoming weights of important neurons, and keep unimportant neurons silent until they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selfless.functional.groups import shrink_groups
from selfless.functional.shapes import wide
from selfless.network.wiring import Wiring
from selfless.preserve.base import COUNT, HEAD, Group, Preserver, count_tasks, widened
from selfless.preserve.capabilities import KnowsHeads, Proximal, State, Tensors, WeighsNodes
from selfless.terms import check_not_negative


@dataclass(frozen=True)
class AGSCL(Preserver, KnowsHeads, Proximal, WeighsNodes):
    """Adaptive group sparsity (Jung, Ahn, Cha and Moon, NeurIPS 2020). θ_n are the incoming weights and the bias of neuron n:

        loss + μ Σ_{n: Ω_n = 0} ‖θ_n‖ + λ Σ_{n: Ω_n > 0} Ω_n ‖θ_n − θ*_n‖      minimised by a proximal step after each optimizer step
        Ω_n ← η Ω_n + mean |h_n|                                               after a task, over its samples and positions

    The first norm silences neurons that the task does not need (θ_n = 0, exactly). The second one holds those that old tasks need: they do
    not move at all in a step that would move them by less than step · λ Ω_n. When a task ends, neurons with Ω_n = 0 are made ready for the
    next one. Their outgoing weights to important neurons and to the task's head become 0, and the former stay 0, so that they cannot
    disturb old tasks. A share ρ of them in each layer gets its incoming weights back from the start of training; the others stay silent.

    The head of a task trains freely in its task and is held afterwards. In a head that tasks share, the outgoing weights of neuron n are a
    group, with the same norm λ Ω_n ‖· − ·*‖; its bias is the weight of an input that is always 1. Those of unimportant neurons are free.

    The authors take the proximal step once per epoch and draw new incoming weights. Here it follows every step, as in the equation, so
    their λ and μ divided by the steps of an epoch are ours; a loop needs no epochs, and a run is the same in a fleet. At strength 0 both
    norms are off. The network is a chain of linear layers and convolutions, a pointwise activation module after each hidden one.
    """

    name: ClassVar[str] = "ags-cl"
    groups: ClassVar[tuple[Group, ...]] = (
        Group("anchor", precision="parameter"),
        Group("start", precision="parameter"),
        HEAD,
        COUNT,
        *(Group(name, like_parameter=False) for name in ("rows", "columns", "place", "importance", "activity")),
    )
    strength: float = 1.0
    mu: float = 0.01
    eta: float = 0.8
    rho: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("mu", "eta", "rho"):
            check_not_negative(self, field)
        for field, what in (("eta", "the share of Ω that a task leaves"), ("rho", "the share of unimportant neurons that start again")):
            if getattr(self, field) > 1:
                raise ValueError(f"{type(self).__name__}: {field} is {getattr(self, field)}; it is {what}, at most 1")

    def init(self, parameters: Tensors) -> State:
        start = {name: p.detach().clone() for name, p in parameters.items()}
        return {**super().init(parameters), "start": start, "count": count_tasks(parameters)}

    def wire(self, state: State, wiring: Wiring) -> State:
        """Store which neurons are at the two ends of every weight. Neuron number G means inputs and outputs, and the constant 1."""
        hidden = {name for name, rows in wiring.rows.items() if bool((rows < wiring.size).all())}
        none = torch.zeros(wiring.size + 1, device=next(iter(wiring.place.values())).device)
        return {
            **state,
            "start": {name: t for name, t in state["start"].items() if name in hidden},
            "rows": dict(wiring.rows),
            "columns": dict(wiring.columns),
            "place": dict(wiring.place),
            "importance": state["importance"] or {"all": none},
        }

    # ------------------------------------------------------------------------------------------------------------------ a step
    def proximal_step(self, state: State, parameters: Tensors, steps: Tensors, strength: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        importance, anchor = state["importance"]["all"], state["anchor"]
        here = {name: wide(p) for name, p in parameters.items() if name in steps}
        for names in _layers(state, here):
            omega = importance[state["rows"][names[0]]].to(here[names[0]].dtype)
            is_held = omega > 0
            centres = [torch.where(_across(is_held, here[n]), anchor[n], 0.0) if n in anchor else torch.zeros_like(here[n]) for n in names]
            parts = [torch.where(self._cut(state, n, here[n]), 0.0, here[n]) if n in state["columns"] else here[n] for n in names]
            amount = steps[names[0]] * torch.where(is_held, strength * omega, self.mu)
            found |= dict(zip(names, shrink_groups(parts, centres, amount), strict=True))
        for name in (n for n in anchor if n in here and n not in state["start"]):
            found[name] = self._held_head(state, name, here[name], steps[name] * strength)
        return {name: torch.where(strength > 0, new.to(parameters[name].dtype), parameters[name]) for name, new in found.items()}

    def _held_head(self, state: State, name: str, p: Tensor, amount: Tensor) -> Tensor:
        """Return a parameter of an output layer after the step: heads of old tasks at θ*, a shared head drawn towards θ*."""
        star, head, value = state["anchor"][name], state["head"].get(name), p
        if name in state["rows"]:
            columns = state["columns"].get(name, state["rows"][name][:1])  # a bias reads the constant 1, whose number is that of its rows
            omega = state["importance"]["all"][columns].to(p.dtype)
            is_shared = torch.ones_like(p, dtype=torch.bool) if head is None else head < 0
            shared = torch.where(is_shared, p, star)  # so that other entries do not count
            turned = (shared.movedim(1, 0), star.movedim(1, 0)) if p.dim() > 1 else (shared[None], star[None])
            (moved,) = shrink_groups([turned[0]], [turned[1]], amount * omega)
            value = torch.where(is_shared, moved.movedim(0, 1) if p.dim() > 1 else moved[0], p)
        return value if head is None else torch.where((head >= 0) & (head < state["count"]["tasks"]), star, value)

    def _cut(self, state: State, name: str, like: Tensor) -> Tensor:
        """Return a mask of the weights from unimportant neurons to important ones, which are 0."""
        is_needed = state["importance"]["all"] > 0
        return _across(is_needed[state["rows"][name]], like) & ~_across(is_needed[state["columns"][name]], like, 1)

    # ------------------------------------------------------------------------------------------------------------------ a task
    def add_activity(self, state: State, activity: Tensors) -> State:
        order = torch.cat([state["place"][layer] for layer in activity])
        values = torch.cat([a.to(state["importance"]["all"].dtype) for a in activity.values()])
        return {**state, "activity": {"all": torch.ones_like(state["importance"]["all"]).scatter(0, order, values)}}

    def consolidate(self, state: State, parameters: Tensors, omega: Tensors) -> State:
        """Return the state with new Ω, and with θ* as the next task starts from it."""
        ended = {**state, "activity": {}, "count": {"tasks": state["count"]["tasks"] + 1}}
        if not state["activity"]:  # a task that this method did not see
            return ended
        ended["importance"] = {"all": self.eta * state["importance"]["all"] + state["activity"]["all"]}
        ended["anchor"] = state["anchor"] | {name: self._restarted(ended, name, p) for name, p in parameters.items()}
        return ended

    def _restarted(self, state: State, name: str, p: Tensor) -> Tensor:
        """Return a parameter as the next task starts from it; `state` has the new Ω and the number of ended tasks."""
        value, needed = widened(p), state["importance"]["all"] > 0
        if name in state["start"]:
            is_needed = needed[state["rows"][name]]
            if name in state["columns"]:
                value = torch.where(self._cut(state, name, p), 0.0, value)
            starts = ~is_needed & ((~is_needed).cumsum(0) - 1 < self.rho * (~is_needed).sum())
            fresh = torch.where(_across(starts, p), state["start"][name].to(value.dtype), 0.0)
            return torch.where(_across(is_needed, p), value, fresh)
        if name in state["columns"]:
            head = state["head"].get(name)
            is_silent = ~_across(needed[state["columns"][name]], p, 1).expand_as(p)
            return torch.where(is_silent if head is None else is_silent & (head < state["count"]["tasks"]), 0.0, value)
        return value

    def restart(self, state: State, parameters: Tensors, strength: Tensor) -> dict[str, Tensor]:
        stored = {name: star for name, star in state["anchor"].items() if name in parameters}
        return {name: torch.where(strength > 0, star.to(parameters[name].dtype), parameters[name]) for name, star in stored.items()}

    def importance(self, state: State) -> Tensors | None:
        """Ω_n for the incoming weights and the bias of neuron n, from the end of the first task on. The state may be stacked."""
        found: dict[str, Tensor] = {}
        for name, star in state["anchor"].items():
            if name in state["start"]:
                omega = state["importance"]["all"].take_along_dim(state["rows"][name], -1)
                found[name] = omega.view(*omega.shape, *[1] * (star.dim() - omega.dim())).expand_as(star)
        return found


def _layers(state: State, parameters: Tensors) -> Iterator[list[str]]:
    """Yield the names of the weight and the bias of each hidden layer, as far as they are among the parameters."""
    by_layer: dict[str, list[str]] = {}
    for name in state["start"]:
        if name in parameters:
            by_layer.setdefault(name.rpartition(".")[0], []).append(name)
    yield from by_layer.values()


def _across(values: Tensor, like: Tensor, axis: int = 0) -> Tensor:
    """Return values (N,) so that they broadcast over `like` along this axis."""
    return values.view(*[1] * axis, -1, *[1] * (like.dim() - axis - 1))
