"""Methods for the tests of `selfless.testing`: some are right, most break one law."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from selfless import MAS, SI, SLNI, DeCov, LwF
from selfless.functional import PairForm
from selfless.preserve import Group, Preserver, State
from selfless.preserve.base import Splits
from selfless.preserve.capabilities import Evaluates
from selfless.sparsify import Sparsifier
from selfless.terms import Term


@dataclass(frozen=True)
class Own(Sparsifier):
    """A formula of one's own, right in every way."""

    name: ClassVar[str] = "own"
    strength: float = 1e-2

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        weights = 1.0 if alpha is None else torch.exp(-alpha)
        return (weights * x.float().square()).sum(-1).mean() if x.dtype != torch.float64 else (weights * x.square()).sum(-1).mean()


@dataclass(frozen=True)
class Careless(Own):
    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True)
class Listed(Own):
    layers: Any = (1, 2)


@dataclass(frozen=True)
class Rooted(Own):
    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return x.float().square().sum(0).sqrt().mean()


@dataclass(frozen=True)
class Stuck(Own):
    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return x.detach().float().square().mean()


@dataclass(frozen=True)
class Doubled(Own):
    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return self.fixed_strength * super().penalty(x, alpha)


@dataclass(frozen=True)
class Looking(Own):
    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return super().penalty(x, alpha) * (2.0 if x.max().item() > 1 else 1.0)


@dataclass(frozen=True)
class NoMean(Own):
    is_mean: ClassVar[bool] = True

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return super().penalty(x, alpha) * len(x)


@dataclass(frozen=True)
class Strict(Own):
    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        assert alpha is None
        return super().penalty(x, alpha)


@dataclass(frozen=True)
class Idle(Own):
    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return (0 * x).sum().float()


class _Turned(torch.autograd.Function):
    """The identity, whose gradient has the wrong sign."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


@dataclass(frozen=True)
class Turned(Own):
    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return super().penalty(_Turned.apply(x), alpha)


@dataclass(frozen=True)
class WrongCovariance(DeCov):
    decorrelates: ClassVar[bool] = True

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return 5 * super().penalty(x, alpha)


@dataclass(frozen=True)
class Later(Own):
    """Right: it begins with the second task."""

    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return x.new_zeros(()) if alpha is None else super().penalty(x, alpha)


@dataclass(frozen=True)
class WrongPairs(SLNI):
    def pair_form(self, n: int, alpha: Tensor | None = None) -> PairForm | None:
        return PairForm(n)


@dataclass(frozen=True)
class Moving(MAS):
    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        found = super().consolidate(state, parameters, omega)
        return {**found, "anchor": {n: a + 0.1 for n, a in found["anchor"].items()}}


@dataclass(frozen=True)
class Repelled(MAS):
    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        return super().consolidate(state, parameters, {n: -0.7 * o - 1e-6 for n, o in omega.items()})


@dataclass(frozen=True)
class Narrow(MAS):
    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        found = super().consolidate(state, parameters, omega)
        return {**found, "omega": {n: o.float() for n, o in found["omega"].items()}}


@dataclass(frozen=True)
class Split(MAS):
    splits: ClassVar[Splits] = "entries"

    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        return super().consolidate(state, parameters, {n: o / o.mean().clamp(min=1e-12) for n, o in omega.items()})


def own_strength(term: MAS) -> float:
    return term.fixed_strength


@dataclass(frozen=True)
class Halved(MAS):
    """Reads its strength in a function of its own, which nobody detects: in a fleet all members would have that of the first."""

    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        return super().consolidate(state, parameters, {n: own_strength(self) * o for n, o in omega.items()})


@dataclass(frozen=True)
class Lazy(MAS):
    """Has no Ω where it is mapped over members."""

    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        is_mapped = "BatchedTensor" in repr(next(iter(parameters.values())))
        return super().consolidate(state, parameters, {n: 0 * o for n, o in omega.items()} if is_mapped else omega)


SEEN: dict[str, int] = {}


@dataclass(frozen=True)
class Rising(Preserver, Evaluates):
    """Evaluates with parameters that depend on how often it was asked."""

    name: ClassVar[str] = "rising"
    strength: float = 0.0

    def evaluated_parameters(self, state: State, parameters: Mapping[str, Tensor], task: Tensor | int | None) -> dict[str, Tensor]:
        SEEN["evaluations"] = SEEN.get("evaluations", 0) + 1
        return {n: p * (-1) ** SEEN["evaluations"] for n, p in parameters.items()}


@dataclass(frozen=True)
class SoftTargets(LwF):
    """Right: a cross-entropy is not 0 at θ*, but its gradient is."""

    def distil(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        return -(teacher.softmax(-1) * outputs.log_softmax(-1)).sum(-1).mean()


@dataclass(frozen=True)
class Share(MAS):
    """Right: its strength is above 0 and at most 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fixed_strength <= 1:
            raise ValueError("a share")


@dataclass(frozen=True)
class Hidden(MAS):
    """Keeps something outside of its state: each call of `consolidate` in this process raises Ω."""

    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        SEEN["calls"] = SEEN.get("calls", 0) + 1
        return super().consolidate(state, parameters, {n: SEEN["calls"] * o for n, o in omega.items()})


@dataclass(frozen=True)
class Forgetful(MAS):
    """Marks a tensor of its state in a way that `state_dict` does not hold."""

    groups: ClassVar[tuple[Group, ...]] = (*MAS.groups, Group("mark", like_parameter=False))

    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        mark = state["mark"].get("all")
        boost = 1.0 if mark is None or hasattr(mark, "seen") else 50.0
        mark = torch.zeros(())
        mark.seen = True  # type: ignore[attr-defined]
        return {**super().consolidate(state, parameters, {n: boost * o for n, o in omega.items()}), "mark": {"all": mark}}


@dataclass(frozen=True)
class Twice(Preserver):
    """Multiplies by its strength, which the runtime does too."""

    name: ClassVar[str] = "twice"
    groups: ClassVar[tuple[Group, ...]] = (Group("anchor"),)
    strength: float = 0.1

    def penalty(self, state: State, parameters: Mapping[str, Tensor]) -> Tensor:
        return self.strength * torch.stack([(parameters[n] - a).square().sum() for n, a in state["anchor"].items()]).sum()

    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        return {"anchor": {n: p.detach().clone() for n, p in parameters.items()}}


@dataclass(frozen=True)
class Vector(Twice):
    def penalty(self, state: State, parameters: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([p.sum() for p in parameters.values()])


@dataclass(frozen=True)
class Optional(Own):
    k: int = 3
    square: bool = True


@dataclass(frozen=True)
class Summed(Own):
    def penalty(self, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return super().penalty(x, alpha) * len(x)


def step_in_place(self: Any, state: State, before: Any, after: Any, gradients: Any) -> State:
    """`observe` of SI, but it changes the state that it gets."""
    new = SI.observe(self, state, before, after, gradients)
    for group, tensors in new.items():
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                state[group][name].copy_(tensor)
    return state


def change(base: Any = MAS, **functions: Any) -> Term:
    """A MAS with other functions. An anchor of its own allows a penalty of its own."""
    kind = type("Changed", (base,), {"anchor": lambda self, state: base.anchor(self, state), "__module__": __name__, **functions})
    return dataclass(frozen=True)(kind)(0.1)  # type: ignore[no-any-return]


def touched(state: State) -> State:
    for tensor in state["omega"].values():
        tensor.mul_(0.99)
    return state


def in_place(omega: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: o.clamp_(max=0.5).clone() for n, o in omega.items()}


def negative(state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
    return {**state, "omega": {n: -o for n, o in omega.items()}, "anchor": {n: p.clone() for n, p in parameters.items()}}


@dataclass(frozen=True)
class Signed(Preserver):
    """−λ Σ|θ − θ*|, with the wrong sign."""

    name: ClassVar[str] = "signed"
    groups: ClassVar[tuple[Group, ...]] = (Group("anchor"),)
    strength: float = 0.1

    def penalty(self, state: State, parameters: Mapping[str, Tensor]) -> Tensor:
        return -torch.stack([(parameters[n] - old).abs().sum() for n, old in state["anchor"].items()]).sum()

    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        return {"anchor": {n: p.detach().clone() for n, p in parameters.items()}}


@dataclass(frozen=True)
class Unfilled(Signed):
    """The state of the start, for ever."""

    name: ClassVar[str] = "unfilled"

    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        return state


@dataclass(frozen=True)
class TurnedAnchor(Signed):
    """λ Σ|θ − θ*|, with a gradient of the wrong sign."""

    name: ClassVar[str] = "turned-anchor"

    def penalty(self, state: State, parameters: Mapping[str, Tensor]) -> Tensor:
        return -super().penalty(state, {n: _Turned.apply(p) for n, p in parameters.items()})
