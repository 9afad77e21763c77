"""The base class of preservers: `init`, `penalty`, `consolidate`, and which importance to measure.

A preserver is a frozen value. Its state is a dictionary of tensors, {"omega": {name: Ω}, "anchor": {name: θ*}, …}, and its functions are
pure: state in, new state out. The keeper has one state. The engine stacks the states of many members and maps the functions over them.

To add a preserver, add a file to this folder, an entry to `selfless.preserve.PRESERVERS` and a row to tests/test_contracts.py. A method
that does more than a penalty inherits capabilities (`selfless.preserve.capabilities`); docs/methods.md has an example of each.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import Tensor

from selfless.importance import Estimator, FunctionNorm, Objective
from selfless.preserve.capabilities import Distils, Evaluates, Freezes, Gated, Phased, Projects, Replays, State, Tensors
from selfless.preserve.deprecated import adopt_old_names
from selfless.terms import Term


@dataclass(frozen=True)
class Group:
    """One group of a preserver's state: {name: tensor}."""

    name: str
    like_parameter: bool = True  # each tensor has the shape of the parameter it is named after
    changes_in_step: bool = False  # a training step changes it; the tensors must keep their shapes in a step


def _reads_strength(cls: type) -> bool:
    """Return whether a function that the class defines, other than `__post_init__`, reads `strength`."""
    functions = [getattr(member, "fget", member) for name, member in cls.__dict__.items() if name != "__post_init__"]
    return any(_names_strength(function.__code__) for function in functions if inspect.isfunction(function))


def _names_strength(code: CodeType) -> bool:
    return "strength" in code.co_names or any(_names_strength(inner) for inner in code.co_consts if isinstance(inner, CodeType))


@dataclass(frozen=True)
class Preserver(Term):
    """A method that adds λ_Ω · penalty(θ) to the loss; 0 before the end of the first task. The base class preserves nothing."""

    role: ClassVar[str] = "preserver"
    strength: float
    groups: ClassVar[tuple[Group, ...]] = ()  # the groups of its state
    retired: ClassVar[tuple[str, ...]] = ()  # groups that earlier versions saved; they are skipped when a state is read
    measures: ClassVar[bool] = False  # True if `consolidate` needs Ω, measured on the task's data
    same_strength: ClassVar[bool] = False  # True if all members of a fleet must have the same strength
    keeps_data: ClassVar[bool] = False  # True if it keeps samples of old tasks (`Replays`): tables and reports say so
    capturable: ClassVar[bool] = True  # True if a CUDA graph can capture its part of a step: Python reads no tensor value there

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        adopt_old_names(cls)
        cls.keeps_data = issubclass(cls, Replays)
        if "same_strength" not in cls.__dict__ and _reads_strength(cls):
            cls.same_strength = True  # a fleet calls the functions of one member's term for all members

    @property
    def objective(self) -> Objective:
        """The function L whose gradients are Ω and α."""
        return FunctionNorm()

    @property
    def alpha_objective(self) -> Objective | None:
        """L for α alone (α lowers the inhibition of important neurons); None: the same L as for Ω."""
        return None

    @property
    def estimator(self) -> Estimator:
        """The way Ω is measured: "per-sample" (exact) or "per-batch"."""
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
        """Return Ω by name, from which `capacity` counts free parameters; None if the method has no Ω."""
        return state.get("omega")

    def check_state(self, state: State) -> None:
        """Raise ValueError if a state that was read from a file is incomplete."""

    # ------------------------------------------------------------------------------------------------------ derived properties
    @property
    def penalises(self) -> bool:
        """True if the method overrides `penalty`."""
        return type(self).penalty is not Preserver.penalty

    @property
    def has_phases(self) -> bool:
        """True if the epochs of a task differ from each other. All members of a fleet then need the same number of epochs."""
        return isinstance(self, Phased | Gated)

    @property
    def needs_task(self) -> bool:
        """True if evaluating an image requires knowing its task."""
        return isinstance(self, Gated) or (isinstance(self, Evaluates) and self.by_task)

    @property
    def draws_randomly(self) -> bool:
        """True if `consolidate` draws random numbers, which the members of a fleet would share."""
        return self.objective.draws

    def check_sum(self, other: Preserver) -> None:
        """Raise ValueError if the capabilities of `self` and `other` exclude each other."""
        pair = f"{self.name} + {other.name} cannot be combined"
        for kind, reason in _EXCLUSIVE:
            if isinstance(self, kind) and isinstance(other, kind):
                raise ValueError(f"{pair}: {reason}. Use one of them")
        if isinstance(self, Gated) and isinstance(other, Distils | Evaluates | Projects | Replays):
            raise ValueError(
                f"{pair}: {other.name} runs the network of old tasks, but the gates of {self.name} are those of the current task. "
                f"Use one of them, or {self.name} with a method that only penalises weights (mas, ewc, si)"
            )
        if isinstance(self, Freezes) and isinstance(other, Phased) and other.warms_up(1):
            remedy = f"{other.name}:{other.strength:g},warmup=0"
            raise ValueError(f"{pair} with a warm-up: the warm-up of {other.name} freezes weights that {self.name} resets; write {remedy}")


_EXCLUSIVE: tuple[tuple[type, str], ...] = (
    (Gated, "both decide which neurons a task uses"),
    (Evaluates, "both decide which parameters a task is evaluated with"),
    (Distils, "both compare the network with a teacher"),
    (Replays, "both keep a memory of old samples"),
)


@dataclass(frozen=True)
class NoPreserver(Preserver):
    """Plain fine-tuning: no protection of old tasks."""

    name: ClassVar[str] = "none"
    strength: float = 0.0


MEMORY = Group("memory", like_parameter=False)  # the samples of old tasks: see `Replays`
HEAD = Group("head")  # the task that each entry of an output layer belongs to: see `KnowsHeads`
COUNT = Group("count", like_parameter=False)  # {"tasks": the number of tasks that have ended}


def count_tasks(parameters: Tensors) -> dict[str, Tensor]:
    """Return {"tasks": 0}, the first value of the group `COUNT`, on the device of the parameters."""
    return {"tasks": torch.zeros_like(next(iter(parameters.values())).detach().flatten()[0], dtype=torch.int64)}


def widened(parameter: Tensor) -> Tensor:
    """Return a detached copy in at least float32: half precision would lose the many small changes of an importance or anchor."""
    copy = parameter.detach().clone()
    return copy.float() if copy.dtype in (torch.float16, torch.bfloat16) else copy


@dataclass(frozen=True)
class Measurement:
    """One pass over a task's data. It measures Ω for the preservers with the numbers `users` (if there are any), and α if `neurons`."""

    objective: Objective
    alpha_objective: Objective | None
    estimator: Estimator
    users: tuple[int, ...]
    neurons: bool


def measurements(terms: Sequence[Preserver]) -> list[Measurement]:
    """Return the passes that these preservers need. Preservers with the same objective and estimator share a pass.

    The first pass also measures α, with the objective of the first preserver that measures Ω.
    """
    leader = next((term for term in terms if term.measures), terms[0])
    keys = list(dict.fromkeys([(leader.objective, leader.estimator), *((t.objective, t.estimator) for t in terms if t.measures)]))
    users = {key: tuple(i for i, t in enumerate(terms) if t.measures and (t.objective, t.estimator) == key) for key in keys}
    return [Measurement(key[0], leader.alpha_objective if k == 0 else None, key[1], users[key], k == 0) for k, key in enumerate(keys)]


def importance_of(terms: Sequence[Preserver], states: Sequence[State]) -> Tensors | None:
    """Return Ω by name; None if no preserver has one. If several have one, take the largest: a parameter is free only if none needs it."""
    found = [omega for term, state in zip(terms, states, strict=True) if (omega := term.importance(state)) is not None]
    if len(found) < 2:
        return found[0] if found else None
    names = dict.fromkeys(name for omega in found for name in omega)
    return {name: torch.stack([omega[name] for omega in found if name in omega]).amax(0) for name in names}
