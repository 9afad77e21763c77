"""RWalk: Fisher information plus a score of how much each parameter lowered the loss during training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selfless.preserve.base import Group, widened
from selfless.preserve.capabilities import Observes, State, Tensors
from selfless.preserve.quadratic import Quadratic
from selfless.terms import Strength, check_count, check_positive


@dataclass(frozen=True)
class RWalk(Quadratic, Observes):
    """Riemannian Walk (Chaudhry et al., ECCV 2018): λ Σ (F̂ + ŝ)(θ − θ*)². F̂ and ŝ are F and s divided by their largest value.

        F ← a·g² + (1 − a)·F   at every step: a moving average of the Fisher information; g is the gradient of the task loss, a = `average`
        s ← s + max(0, −Σ g·dθ) / (½ F Δθ² + ξ)   every Δt = `every` steps: the decrease of the loss due to a parameter, divided by the
                                                  distance it moved in KL-divergence; Σ and Δθ are over those steps, ξ = `damping`

    F continues from task to task. The score of earlier tasks and that of the last task are averaged, ŝ ← ½(ŝ + ŝ_new). g is the mean
    gradient of the batch, as in SI (the paper's definition is per sample). The replay memory that the paper adds for one head over all
    classes is not implemented.
    """

    name: ClassVar[str] = "rwalk"
    groups: ClassVar[tuple[Group, ...]] = (
        *Quadratic.groups,
        Group("earned", precision="low"),
        *(Group(name, changes_in_step=True) for name in ("path", "fisher", "score", "start")),
        Group("window", like_parameter=False, changes_in_step=True),
    )
    strength: Strength = 1.0
    average: float = 0.9
    every: int = 10
    damping: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "damping")
        check_positive(self, "average")
        check_count(self, "every", 1)
        if self.average > 1:
            raise ValueError(f"RWalk: average is {self.average}; it is the weight of the newest gradient, at most 1")

    def init(self, parameters: Tensors) -> State:
        """Return zeros, and the start of the path."""
        start = {name: widened(p) for name, p in parameters.items()}
        zeros = {group: {n: torch.zeros_like(t) for n, t in start.items()} for group in ("path", "fisher", "score")}
        window = {n: torch.zeros_like(t[..., :1] if t.dim() else t) for n, t in start.items()}  # steps since the last multiple of Δt
        return {"omega": {}, "anchor": {}, "earned": {}, **zeros, "start": start, "window": window}

    def start_path(self, state: State, parameters: Tensors) -> State:
        return {**state, "start": {name: widened(p) for name, p in parameters.items()}}

    def observe(self, state: State, before: Tensors, after: Tensors, gradients: Tensors) -> State:
        """Update F and the path; every Δt steps add to the score and start a new path."""
        new = {group: dict(state[group]) for group in ("path", "fisher", "score", "start", "window")}
        for name, g in gradients.items():
            if name not in new["path"]:  # a parameter that was added to the model later
                first = self.init({name: before[name]})
                for group in new:
                    new[group][name] = first[group][name]
            path = new["path"][name] - g * (after[name] - before[name]).to(g.dtype)
            fisher = self.average * g.square() + (1 - self.average) * new["fisher"][name]
            steps = new["window"][name] + 1
            is_over = steps >= self.every
            theta = widened(after[name])
            score = new["score"][name]
            new["score"][name] = torch.where(is_over, score + self._score(path, fisher, theta - new["start"][name]), score)
            new["start"][name] = torch.where(is_over, theta, new["start"][name])
            new["path"][name], new["fisher"][name] = torch.where(is_over, 0.0, path), fisher
            new["window"][name] = torch.where(is_over, 0.0, steps)
        return {**state, **new}

    def _score(self, path: Tensor, fisher: Tensor, distance: Tensor) -> Tensor:
        """max(0, −ΔL) / (½ F Δθ² + ξ), with −ΔL the `path` and Δθ the `distance`."""
        return path.clamp(min=0) / (0.5 * fisher * distance.square() + self.damping)

    def consolidate(self, state: State, parameters: Tensors, omega: Tensors) -> State:
        """Ω = F̂ + ŝ, θ* = θ. The last steps of the task count too, even if they are fewer than Δt."""
        score = {}
        for name, p in parameters.items():
            if name in state["path"]:
                distance = widened(p) - state["start"][name]
                score[name] = state["score"][name] + self._score(state["path"][name], state["fisher"][name], distance)
        new, old = _scale(score), state["earned"]
        earned = {n: (s + old[n]) / 2 if n in old else s for n, s in new.items()}
        fisher = _scale({n: state["fisher"][n] for n in score})
        restart = self.init(parameters)
        return {
            **restart,
            "omega": state["omega"] | {n: fisher[n] + earned[n] for n in score},
            "anchor": state["anchor"] | {n: widened(parameters[n]) for n in score},
            "earned": old | earned,
            "fisher": restart["fisher"] | state["fisher"],
        }


def _scale(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Divide by the largest value over all parameters."""
    if not values:
        return values
    largest = torch.stack([v.max() for v in values.values()]).max()
    return {n: v / largest.clamp(min=torch.finfo(v.dtype).tiny) for n, v in values.items()}
