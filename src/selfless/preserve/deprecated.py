"""Old names of the flags and methods of a preserver: custom classes that use them still work for one release, with a warning."""

from __future__ import annotations

import warnings
from typing import Any

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
}


def adopt_old_names(cls: Any) -> None:
    """Add the new names to a custom class that uses old ones, and warn."""
    if not cls.is_custom():
        return
    for old, new in RENAMED.items():
        if old in cls.__dict__ and new not in cls.__dict__:
            warnings.warn(f"{cls.__name__}.{old} is now {new}; rename it", DeprecationWarning, stacklevel=4)
            setattr(cls, new, cls.__dict__[old])
    for flag, capability in FLAGS.items():
        if cls.__dict__.get(flag) is True and not issubclass(cls, capability):
            warnings.warn(
                f"{cls.__name__}: {flag} = True is now a base class; inherit selfless.preserve.capabilities.{capability.__name__}",
                DeprecationWarning,
                stacklevel=4,
            )
            capability.register(cls)
            for name, member in _BRIDGES.get(flag, {}).items():
                if not hasattr(cls, name):
                    setattr(cls, name, member)


# Methods that an old class did not need, because keeper and engine knew the groups of its state.
_BRIDGES: dict[str, dict[str, Any]] = {
    "watches": {"start_path": lambda self, state, parameters: {**state, "start": {n: p.detach().clone() for n, p in parameters.items()}}},
    "distils": {"teacher": lambda self, state: state["anchor"]},
    "turns": {"warms_up": can.Phased.warms_up},
    "evaluates": {"by_task": False},
    "owns": {name: can.KnowsHeads.__dict__[name] for name in ("place_heads", "in_own_head", "in_other_head")},
}
