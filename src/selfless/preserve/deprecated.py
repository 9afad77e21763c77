"""Old names of the flags and methods of a preserver: custom classes that use them still work for one release, with a warning."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Container, Iterable
from typing import Any

from selfless.importance import LayerNorms
from selfless.importance.objectives import is_by_layer
from selfless.preserve import capabilities as can

RENAMED = {
    "how": "estimator",
    "spares": "alpha_objective",
    "alike": "same_strength",
    "recordable": "capturable",
    "turning": "starts_phase",
    "turn": "begin_phase",
    "evaluated": "evaluated_parameters",
    "identifies": "by_task",
    "dropped": "drop_nodes",
    "kept_gate": "hard_gate",
    "learn_gates": "step_gates",
    "coded": "add_encoder",
}
FLAGS: dict[str, Any] = {
    "watches": can.Observes,
    "distils": can.Distils,
    "encodes": can.Encodes,
    "projects": can.Projects,
    "turns": can.Phased,
    "evaluates": can.Evaluates,
    "drops": can.Drops,
    "owns": can.KnowsHeads,
    "gates": can.Gated,
}
_DECLARED: set[type] = set()  # custom classes whose authors declare `groups`


def adopt_old_names(cls: Any) -> None:
    """Add the new names to a custom class that uses old ones, and warn."""
    if not cls.is_custom():
        return
    for old, new in RENAMED.items():
        if old in cls.__dict__ and new not in cls.__dict__:
            _warn(f"{cls.__name__}.{old} is now {new}; rename it")
            setattr(cls, new, cls.__dict__[old])
    for flag, capability in FLAGS.items():
        if cls.__dict__.get(flag) is True and not issubclass(cls, capability):
            _inherit(cls, capability, f"{flag} = True is now")
            for name, member in _BRIDGES.get(flag, {}).items():
                if not hasattr(cls, name):
                    setattr(cls, name, member)
    if "check_network" in cls.__dict__ and not issubclass(cls, can.Freezes):
        _inherit(cls, can.Freezes, "check_network belongs to")
    if cls.__dict__.get("local") is True:
        _adopt_local(cls)
    if "anchor" in cls.__dict__ and len(inspect.signature(cls.anchor).parameters) > 2:
        raise TypeError(
            f"{cls.__name__}.anchor(state, parameters, step) is now anchor(state), which returns selfless.functional.Anchor(Ω, θ*); "
            "the keeper and the engine take the implicit step themselves"
        )
    if "groups" in cls.__dict__:
        _DECLARED.add(cls)
        return
    stepped, loose = cls.__dict__.get("stepped", ()), cls.__dict__.get("loose", ())
    if stepped or loose:
        _declare(cls, dict.fromkeys((*stepped, *loose)), loose, stepped)
        _warn(f"{cls.__name__}: stepped and loose are now properties of groups; write groups = {_spell(cls.groups)}")
    if cls.__dict__.get("watches") is True and all(group.name != "start" for group in cls.groups):
        _declare(cls, ["start"], (), ())  # which `start_path` below adds


def read_old_name(term: Any, name: str) -> Any:
    """Return the value of an old attribute of a preserver, and warn; raise AttributeError for any other name."""
    if name in RENAMED and hasattr(type(term), RENAMED[name]):
        value, new = getattr(term, RENAMED[name]), RENAMED[name]
    elif name in FLAGS:
        value, new = isinstance(term, FLAGS[name]), f"isinstance(…, {FLAGS[name].__name__})"
    elif name == "local":
        value, new = is_by_layer(term.objective), "objective.by_layer"
    elif name in ("stepped", "loose"):
        value = tuple(g.name for g in term.groups if (g.changes_in_step if name == "stepped" else not g.like_parameter))
        new = "a property of its groups"
    else:
        return object.__getattribute__(term, name)  # raises the usual AttributeError, also one from inside a property
    warnings.warn(f"{type(term).__name__}.{name} is now {new}", DeprecationWarning, stacklevel=3)
    return value


def _warn(text: str) -> None:
    warnings.warn(text, DeprecationWarning, stacklevel=5)


def _inherit(cls: Any, capability: Any, what: str) -> None:
    """Make the class a virtual subclass of the capability, and warn."""
    text = f"{cls.__name__}: {what} a base class; inherit selfless.preserve.capabilities.{capability.__name__}"
    warnings.warn(text, DeprecationWarning, stacklevel=5)
    capability.register(cls)


def _adopt_local(cls: Any) -> None:
    """Replace `local = True` by the objective `LayerNorms`, unless the class has an objective of its own."""
    from selfless.preserve.base import Preserver

    if cls.objective is not Preserver.objective:
        raise TypeError(
            f"{cls.__name__}: local = True is now an objective; remove it and return selfless.importance.LayerNorms() from objective"
        )
    _warn(f"{cls.__name__}: local = True is now an objective; return selfless.importance.LayerNorms() from objective")
    cls.objective = property(lambda self: LayerNorms())


def _declare(cls: Any, names: Iterable[str], loose: Container[str], stepped: Container[str]) -> None:
    """Add groups to those that the class inherits or has."""
    from selfless.preserve.base import Group

    new = [Group(name, like_parameter=name not in loose, changes_in_step=name in stepped) for name in names]
    replaced = {group.name for group in new}
    cls.groups = (*(group for group in cls.groups if group.name not in replaced), *new)


def adopt_groups(cls: Any, state: can.State, parameters: Container[str]) -> list[str]:
    """Return the groups of the state that are not declared. A class that declares none itself gets them, with a warning."""
    declared = {group.name for group in cls.groups}
    missing = [name for name in state if name not in declared]
    if not missing or not cls.is_custom() or not _DECLARED.isdisjoint(cls.__mro__):
        return missing
    _declare(cls, missing, [name for name in missing if any(n not in parameters for n in state[name])], ())
    warnings.warn(
        f"{cls.__name__} does not declare the groups of its state; write groups = {_spell(cls.groups)}", DeprecationWarning, stacklevel=4
    )
    return []


def _spell(groups: Iterable[Any]) -> str:
    """Return groups as Python code."""

    def one(group: Any) -> str:
        options = [repr(group.name).replace("'", '"')]
        options += [] if group.like_parameter else ["like_parameter=False"]
        options += ["changes_in_step=True"] if group.changes_in_step else []
        return f"Group({', '.join(options)})"

    return f"({', '.join(map(one, groups))},)"


# Members that an old class did not need: they had a default, or keeper and engine knew the groups of its state.
_BRIDGES: dict[str, dict[str, Any]] = {
    "watches": {"start_path": lambda self, state, parameters: {**state, "start": {n: p.detach().clone() for n, p in parameters.items()}}},
    "distils": {"teacher": lambda self, state: state["anchor"]},
    "turns": {"warms_up": can.Phased.warms_up, "without_warmup": can.Phased.without_warmup},
    "evaluates": {"by_task": False, "evaluated_parameters": lambda self, state, parameters, task: {}},
    "owns": {name: can.KnowsHeads.__dict__[name] for name in ("place_heads", "in_own_head", "in_other_head")},
    "gates": {
        "gate_count": lambda self, state: state["fresh"]["all"].shape[-1],
        "start_gates": lambda self, state, noise: {**state, "fresh": {"all": noise.to(state["fresh"]["all"])}},
    },
}
