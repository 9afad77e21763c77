"""The base class of preservers: `init`, `penalty`, `consolidate`, and which importance to measure.

A preserver is a frozen value. Its state is a dictionary of tensors, {"omega": {name: Ω}, "anchor": {name: θ*}, …}, and its functions are
pure: state in, new state out. The keeper has one state. The engine stacks the states of many members and maps the functions over them.

To add a preserver, add a file to this folder, an entry to `selfless.preserve.PRESERVERS` and a row to tests/test_contracts.py. A method
that does more than a penalty inherits capabilities (`selfless.preserve.capabilities`); docs/capabilities.md has an example of each.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from selfless.importance import Estimator, FunctionNorm, Objective
from selfless.importance.objectives import draws_targets
from selfless.preserve.capabilities import (
    Distils,
    Drops,
    Evaluates,
    Freezes,
    Gated,
    Observes,
    Phased,
    Projects,
    ProjectsSteps,
    Proximal,
    Replays,
    State,
    Tensors,
    WeighsNodes,
)
from selfless.preserve.deprecated import adopt_old_names, read_old_name
from selfless.terms import Strength, Term, one_number

# The precision a keeper may store a group in. "full": always as it is, as many small changes add up in it. "parameter": it holds values of
# parameters, so their precision is enough. "low": it holds importances, where a relative error of 0.4 % does no harm.
Precision = Literal["full", "parameter", "low"]
# How `consolidate` may be called: for everything at once, for one parameter at a time, or for some entries of a parameter at a time.
Splits = Literal["whole", "parameters", "entries"]


@dataclass(frozen=True)
class Group:
    """One group of a preserver's state: {name: tensor}."""

    name: str
    like_parameter: bool = True  # each tensor has the shape of the parameter it is named after
    changes_in_step: bool = False  # a training step changes it; the tensors must keep their shapes in a step
    precision: Precision = "full"


def consolidated(term: Preserver, state: State, parameters: Tensors, omega: Tensors) -> State:
    """Return what `term.consolidate` returns; raise ValueError if that is no state, or if a tensor has not the shape of its parameter."""
    new: State | None = term.consolidate(state, parameters, omega)
    if not isinstance(new, Mapping):
        raise ValueError(f"{type(term).__name__}.consolidate returned {new!r}; return the new state, a dictionary of its groups")
    for group in term.groups:
        for name, tensor in new.get(group.name, {}).items() if group.like_parameter else ():
            if name in parameters and tensor.shape != parameters[name].shape:
                raise ValueError(
                    f"{type(term).__name__}.consolidate returned {group.name} of {name!r} with shape {tuple(tensor.shape)}; "
                    f"it must have that of the parameter, {tuple(parameters[name].shape)}, or be in a Group(…, like_parameter=False)"
                )
    return new


ARGUMENTS = {"penalty": ("state", "parameters"), "consolidate": ("state", "parameters", "omega")}  # they are passed by position


def _check_order(cls: type, name: str, taken: tuple[str, ...]) -> None:
    """Raise TypeError if a function that the class defines takes other arguments, or these in another order."""
    function = cls.__dict__.get(name)
    if not inspect.isfunction(function) or hasattr(function, "__wrapped__"):
        return
    found = inspect.signature(function)
    names = list(found.parameters)[1:]
    moved = any(own in taken and i < len(taken) and taken[i] != own for i, own in enumerate(names))
    try:
        found.bind(None, *taken)
    except TypeError:
        moved = True
    if moved:
        raise TypeError(f"{cls.__name__}.{name} takes ({', '.join(['self', *names])}); write {name}(self, {', '.join(taken)})")


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
    strength: Strength
    groups: ClassVar[tuple[Group, ...]] = ()  # the groups of its state
    retired: ClassVar[tuple[str, ...]] = ()  # groups that earlier versions saved; they are skipped when a state is read
    measures: ClassVar[bool] = False  # True if `consolidate` needs Ω, measured on the task's data
    same_strength: ClassVar[bool] = False  # True if all members of a fleet must have the same strength
    reads_strength: ClassVar[bool] = False  # True if a function reads `strength`; found by itself. If members differ, it is a tensor then
    splits: ClassVar[Splits] = "whole"  # a keeper calls `consolidate` in parts where it can, which needs less memory
    is_weight: ClassVar[bool] = True  # False if a larger strength does not hold more: a share, a rate, a threshold. `tune` refuses it
    keeps_data: ClassVar[bool] = False  # True if it keeps samples of old tasks (`Replays`): tables and reports say so
    capturable: ClassVar[bool] = True  # True if a CUDA graph can capture its part of a step: Python reads no tensor value there

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        adopt_old_names(cls)
        for name, taken in ARGUMENTS.items():
            _check_order(cls, name, taken)
        cls.keeps_data = issubclass(cls, Replays)
        if "consolidate" in cls.__dict__ and "splits" not in cls.__dict__:
            cls.splits = "whole"  # an inherited promise is about another formula
        cls.reads_strength = cls.reads_strength or _reads_strength(cls)
        if "same_strength" not in cls.__dict__ and (_reads_strength(cls) or issubclass(cls, ProjectsSteps)):
            cls.same_strength = True  # a function may branch on its strength, and a fleet projects the steps of all members or of none

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute under its old name, with a warning; only called for names that the class does not have."""
            return read_old_name(self, name)

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

    def auto_strength(self, state: State) -> Tensor:
        """Return λ of the strength "auto", given the state at the end of the first task."""
        raise NotImplementedError(f"{type(self).__name__} has an auto_share, so it must define auto_strength")

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
        return draws_targets(self.objective)

    @property
    def without_strength(self) -> Term:
        """The preserver at strength 0; itself if all members of a fleet must have the same strength."""
        return self if self.same_strength else self.neutral()

    @property
    def step_kind(self) -> str:
        """What preservers that train in one fleet have in common: their steps differ in numbers alone. By default all but the strength."""
        return repr(self.without_strength)

    @property
    def works_on_shards(self) -> bool:
        """True if every function treats each entry of a parameter alone: then each rank can compute on its rows of sharded parameters."""
        by_entry = self.splits == "entries" or type(self).consolidate is Preserver.consolidate
        return by_entry and not isinstance(self, _NEED_WHOLE)

    def conflict(self, other: Preserver) -> str | None:
        """Return why the capabilities of `self` and `other` exclude each other, with the remedy; None if they do not."""
        for kind, reason in _EXCLUSIVE:
            if isinstance(self, kind) and isinstance(other, kind):
                return f"{reason}. Use one of them"
        for kind, reason in _AGAINST_GATES:
            if isinstance(self, Gated) and isinstance(other, kind):
                return f"{reason.format(gated=self.name, other=other.name)}. Use one of them"
        if isinstance(self, ProjectsSteps) and isinstance(other, Freezes | Evaluates | Proximal):
            return f"{other.name} sets weights to other values than the optimizer's, which {self.name} does not see. Use one of them"
        if isinstance(self, WeighsNodes) and isinstance(other, Freezes | Evaluates):
            return f"{self.name} restarts neurons that {other.name} may have kept for an old task. Use one of them"
        if isinstance(self, Freezes) and isinstance(other, Phased) and other.warms_up(1):
            plain = other.without_warmup()
            remedy = "Use one of them" if plain is None else f"Without a warm-up it can: write {plain}"
            return f"the warm-up of {other.name} holds weights that {self.name} resets. {remedy}"
        return None


def cost_of(term: Preserver, state: State, parameters: Tensors) -> Tensor:
    """Return `term.penalty(state, parameters)`; raise ValueError if it is not one number."""
    value: Tensor = one_number(term.penalty(state, parameters), f"{type(term).__name__}.penalty")
    return value


_EXCLUSIVE: tuple[tuple[type, str], ...] = (
    (Freezes, "both reserve weights or neurons for each task"),
    (Gated, "both decide which neurons a task uses"),
    (Evaluates, "both decide which parameters a task is evaluated with"),
    (Distils, "both compare the network with a teacher"),
    (Replays, "both keep a memory of old samples"),
    (ProjectsSteps, "both project the steps of the optimizer"),
    (WeighsNodes, "both restart the neurons that are not important"),
)
_AGAINST_GATES: tuple[tuple[type, str], ...] = (
    (Distils, "{other} runs the network of old tasks, but the gates of {gated} are those of the current task"),
    (Evaluates, "{other} evaluates tasks with other weights than the trained ones, for which {gated} learned its gates"),
    (Projects, "both reset weights after each step"),
    (Replays, "{other} runs old samples, but the gates of {gated} are those of the current task"),
)


_NEED_WHOLE = (Distils, Drops, Evaluates, Gated, Observes, Phased, Projects, ProjectsSteps, Proximal, Replays, WeighsNodes)


@dataclass(frozen=True)
class NoPreserver(Preserver):
    """Plain fine-tuning: no protection of old tasks."""

    name: ClassVar[str] = "none"
    is_weight: ClassVar[bool] = False
    strength: float = 0.0


MEMORY = Group("memory", like_parameter=False)  # the samples of old tasks: see `Replays`
HEAD = Group("head")  # the task that each entry of an output layer belongs to: see `KnowsHeads`
CURVATURE = Group("curvature", like_parameter=False, changes_in_step=True)  # {"largest": κ}, see `Distils`
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
    wanted = [(term.objective, term.estimator) for term in terms]  # read once: an objective may be equal to itself only
    leader = next((i for i, term in enumerate(terms) if term.measures), 0)
    keys: list[tuple[Objective, Estimator]] = []
    for key in (wanted[i] for i in (leader, *range(len(terms))) if i == leader or terms[i].measures):
        if key not in keys:
            keys.append(key)
    users = [tuple(i for i, term in enumerate(terms) if term.measures and wanted[i] == key) for key in keys]
    alpha = terms[leader].alpha_objective
    return [Measurement(key[0], None if k else alpha, key[1], users[k], k == 0) for k, key in enumerate(keys)]


def read_states(terms: Sequence[Preserver], tensors: Tensors, start: str = "state.") -> list[State]:
    """Return the states that flat tensors hold as `<start><group>.<name>`; of several preservers, as `<start><number>.<group>.<name>`."""
    states: list[State] = []
    for number, term in enumerate(terms):
        state: State = {group.name: {} for group in term.groups}
        prefix = start if len(terms) == 1 else f"{start}{number}."
        for key, tensor in tensors.items():
            group, _, name = key.removeprefix(prefix).partition(".")
            if key.startswith(prefix) and group not in term.retired:
                state.setdefault(group, {})[name] = tensor
        states.append(state)
    return states


def importance_of(terms: Sequence[Preserver], states: Sequence[State]) -> Tensors | None:
    """Return Ω by name; None if no preserver has one. If several have one, take the largest: a parameter is free only if none needs it."""
    found = [omega for term, state in zip(terms, states, strict=True) if (omega := term.importance(state)) is not None]
    if len(found) < 2:
        return found[0] if found else None
    names = dict.fromkeys(name for omega in found for name in omega)
    return {name: torch.stack([omega[name] for omega in found if name in omega]).amax(0) for name in names}
