"""The core of a preserver: `init`, `penalty`, `consolidate`, and the importance it wants measured.

A preserver is a frozen value. Its state is explicit, {"omega": {name: Ω}, "anchor": {name: θ*}, …}, all tensors, and its functions are
pure: state in, new state out. The keeper holds one state; the engine stacks many and maps the same functions over them.

To add one: a file in this room, an entry in `selfless.preserve.PRESERVERS`, a row in tests/test_contracts.py. What a method does besides
a penalty it inherits as a capability (`selfless.preserve.capabilities`); docs/methods.md has an example of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from selfless.importance import Estimator, FunctionNorm, Objective
from selfless.preserve.capabilities import Distils, Evaluates, Freezes, Gated, Phased, Projects, State, Tensors
from selfless.preserve.deprecated import adopt_old_names
from selfless.terms import Term


@dataclass(frozen=True)
class Group:
    """One group of a preserver's state: {name: tensor}."""

    name: str
    like_parameter: bool = True  # each tensor has the shape of the parameter it is named after
    changes_in_step: bool = False  # a training step changes it; its tensors then keep their shapes


@dataclass(frozen=True)
class Preserver(Term):
    """λ_Ω · penalty(θ), which is 0 before the first task ended. The base class preserves nothing."""

    role: ClassVar[str] = "preserver"
    strength: float
    groups: ClassVar[tuple[Group, ...]] = ()  # the groups of its state
    retired: ClassVar[tuple[str, ...]] = ()  # groups that earlier versions saved and that are skipped when a state is read
    measures: ClassVar[bool] = False  # True if `consolidate` wants Ω measured on the task's data
    same_strength: ClassVar[bool] = False  # True if all members of a fleet must have the same strength
    capturable: ClassVar[bool] = True  # True if no function that a step calls looks at a tensor's value: a CUDA graph may hold it

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        adopt_old_names(cls)

    @property
    def objective(self) -> Objective:
        """What Ω and α are gradients of."""
        return FunctionNorm()

    @property
    def alpha_objective(self) -> Objective | None:
        """What α alone, by which inhibition spares neurons, is the gradient of; None: the same as Ω."""
        return None

    @property
    def estimator(self) -> Estimator:
        """How Ω is measured: "per-sample" (exact) or "per-batch"."""
        return "per-sample"

    def init(self, parameters: Tensors) -> State:
        """Return the state before the first task."""
        return {group.name: {} for group in self.groups}

    def penalty(self, state: State, parameters: Tensors) -> Tensor:
        """Return the penalty at `parameters`, without the strength."""
        return next(iter(parameters.values())).new_zeros(())

    def consolidate(self, state: State, parameters: Tensors, omega: Tensors) -> State:
        """Return the state after a task that ended at `parameters`, with the importances `omega` measured on it."""
        return state

    def importance(self, state: State) -> Tensors | None:
        """Return Ω by name, of which `capacity` counts what is free; None if the method has no such thing."""
        return state.get("omega")

    def check_state(self, state: State) -> None:
        """Raise for a state, read from a file, that is incomplete."""

    # -------------------------------------------------------------------------------------------- what follows from the above
    @property
    def penalises(self) -> bool:
        """True if the method has a penalty of its own."""
        return type(self).penalty is not Preserver.penalty

    @property
    def has_phases(self) -> bool:
        """True if epochs of a task differ, so that the members of a fleet need the same number of them."""
        return isinstance(self, Phased | Gated)

    @property
    def needs_task(self) -> bool:
        """True if a task can only be evaluated by someone who knows which task it is."""
        return isinstance(self, Gated) or (isinstance(self, Evaluates) and self.by_task)

    @property
    def draws_randomly(self) -> bool:
        """True if consolidating draws random numbers, which the members of a fleet would share."""
        return self.objective.draws

    def check_sum(self, other: Preserver) -> None:
        pair = f"{self.name} + {other.name} cannot be combined"
        for kind, reason in _EXCLUSIVE:
            if isinstance(self, kind) and isinstance(other, kind):
                raise ValueError(f"{pair}: {reason}. Use one of them")
        if isinstance(self, Gated) and isinstance(other, Distils | Evaluates | Projects):
            raise ValueError(
                f"{pair}: {other.name} needs the network as it was for old tasks, and the gates of {self.name} are the present task's. "
                f"Use one of them, or {self.name} with a method that only holds weights (mas, ewc, si)"
            )
        if isinstance(self, Freezes) and isinstance(other, Phased) and other.warms_up(1):
            remedy = f"{other.name}:{other.strength:g},warmup=0"
            raise ValueError(f"{pair} while {other.name} has a warm-up, which holds weights that {self.name} resets: write {remedy}")


_EXCLUSIVE: tuple[tuple[type, str], ...] = (
    (Gated, "both decide which neurons a task uses"),
    (Evaluates, "both decide with which parameters a task is evaluated"),
    (Distils, "both compare the network with a teacher"),
)


@dataclass(frozen=True)
class NoPreserver(Preserver):
    """Plain fine-tuning: nothing is kept."""

    name: ClassVar[str] = "none"
    strength: float = 0.0


HEAD = Group("head")  # the owner of each entry of an output layer: `KnowsHeads`
COUNT = Group("count", like_parameter=False)  # {"tasks": how many have ended}


def count_tasks(parameters: Tensors) -> dict[str, Tensor]:
    """Return {"tasks": 0}: how many tasks have ended, for states that must know."""
    return {"tasks": torch.zeros_like(next(iter(parameters.values())).detach().flatten()[0], dtype=torch.int64)}


def widened(parameter: Tensor) -> Tensor:
    """Return a detached copy in at least float32: importances and anchors outlive many small steps."""
    copy = parameter.detach().clone()
    return copy.float() if copy.dtype in (torch.float16, torch.bfloat16) else copy


@dataclass(frozen=True)
class Measurement:
    """One pass over a task's data: Ω for the preservers numbered `users` (none: Ω is not wanted), α if `neurons`."""

    objective: Objective
    alpha_objective: Objective | None
    estimator: Estimator
    users: tuple[int, ...]
    neurons: bool


def measurements(terms: Sequence[Preserver]) -> list[Measurement]:
    """Return the passes that measure what these preservers need: preservers with the same objective and estimator share one.

    α is measured in the first pass, as the first preserver with an Ω has it.
    """
    leader = next((term for term in terms if term.measures), terms[0])
    keys = list(dict.fromkeys([(leader.objective, leader.estimator), *((t.objective, t.estimator) for t in terms if t.measures)]))
    users = {key: tuple(i for i, t in enumerate(terms) if t.measures and (t.objective, t.estimator) == key) for key in keys}
    return [Measurement(key[0], leader.alpha_objective if k == 0 else None, key[1], users[key], k == 0) for k, key in enumerate(keys)]


def importance_of(terms: Sequence[Preserver], states: Sequence[State]) -> Tensors | None:
    """Return Ω by name: for several preservers the largest, since a parameter is free only if none needs it; None if none has an Ω."""
    found = [omega for term, state in zip(terms, states, strict=True) if (omega := term.importance(state)) is not None]
    if len(found) < 2:
        return found[0] if found else None
    names = dict.fromkeys(name for omega in found for name in omega)
    return {name: torch.stack([omega[name] for omega in found if name in omega]).amax(0) for name in names}
