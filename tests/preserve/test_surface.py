"""What records, keys of runs and saved states depend on: names, defaults, groups of state.

Whoever changes something here must add a way to read old files.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from selfless.preserve import PRESERVERS, Group, NoPreserver
from selfless.preserve.base import COUNT, CURVATURE, HEAD, MEMORY, Preserver
from selfless.preserve.deprecated import FLAGS, RENAMED

# name → the defaults of its fields; its groups: "~" is not shaped like a parameter, "!" changes in a step, "/…" its precision
QUADRATIC = "omega/low anchor/parameter"
SURFACE: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"strength": 0.0}, ""),
    "mas": ({"strength": 0.1, "estimator": "per-sample"}, QUADRATIC),
    "mas-local": ({"strength": 0.1}, QUADRATIC),
    "ewc": (
        {"strength": 10.0, "mode": "online", "decay": 1.0, "fisher": "empirical", "estimator": "per-sample", "alpha": "loss"},
        f"{QUADRATIC} offset~",
    ),
    "ewc-online": (
        {"strength": 10.0, "mode": "online", "decay": 0.9, "fisher": "empirical", "estimator": "per-sample", "alpha": "loss"},
        f"{QUADRATIC} offset~",
    ),
    "si": ({"strength": 1.0, "damping": 0.1}, f"{QUADRATIC} path! start/parameter"),
    "rwalk": (
        {"strength": 1.0, "average": 0.9, "every": 10, "damping": 0.001},
        f"{QUADRATIC} earned/low path! fisher! score! start! window~!",
    ),
    "lwf": ({"strength": 1.0, "temperature": 2.0, "warmup": 0, "damped": True}, "anchor/parameter held head count~ curvature~!"),
    "ebll": (
        {"strength": 1.0, "temperature": 2.0, "warmup": 1, "damped": True}
        | {"drift": 0.1, "code": 100, "reconstruction": 0.01, "steps": 300, "rate": 0.01},
        "anchor/parameter held head count~ curvature~! encoder~",
    ),
    "imm": (
        {"strength": 0.001, "merge": "mode", "fisher": "empirical", "damping": 1e-08, "drop": 0.0, "alpha": "loss"},
        f"{QUADRATIC} merged mass/low head count~",
    ),
    "hat": (
        {"strength": 0.75, "s_max": 400.0, "clamp": 50.0, "limit": 6.0, "rate": None},
        "anchor/parameter frozen head count~ rows~ columns~ place~ used~ kept~ embedding~!",
    ),
    "packnet": ({"strength": 0.5, "retrain": 1 / 3}, "owner anchor/parameter pruned head count~"),
    "gpm": ({"strength": 0.97, "rise": 0.0, "first": None, "samples": 125}, "basis~ scale~ held~ head count~"),
    "sgp": ({"strength": 0.97, "rise": 0.0, "first": None, "samples": 125, "alpha": 10.0}, "basis~ scale~ held~ head count~"),
    "ags-cl": (
        {"strength": 1.0, "mu": 0.01, "eta": 0.8, "rho": 0.75},
        "anchor/parameter start/parameter head count~ rows~ columns~ place~ importance~ activity~",
    ),
    "replay": ({"strength": 1.0, "samples": 200, "batch": 100}, "memory~"),
    "der": ({"strength": 1.0, "samples": 200, "batch": 100, "beta": 1.0}, "memory~"),
}
# What keeper and engine read from the class; every method that is not named has the first value.
PROMISES: dict[str, dict[Any, str]] = {
    "measures": {False: "", True: "mas mas-local ewc ewc-online imm"},
    "same_strength": {False: "packnet", True: "gpm sgp"},
    "splits": {"whole": "", "entries": "mas mas-local ewc ewc-online si lwf ebll imm", "parameters": "hat packnet"},
    "keeps_data": {False: "", True: "replay der"},
    "capturable": {True: ""},
    "retired": {(): "", ("fresh",): "hat"},
    "auto_share": {None: "", 60.0: "mas mas-local ewc ewc-online si rwalk"},
    "why_no_auto": {
        "no scale was measured for it": "",
        "its L2-transfer treats all parameters alike (Ω = 1)": "imm",
        "its strength weighs the share of gates that are open, which has no unit": "hat",
        "its strength is the share of weights that is pruned, which has no unit": "packnet",
        "its strength is a share of energy, which has no unit": "gpm sgp",
    },
    "needs_task": {False: "", True: "hat packnet"},
    "has_phases": {False: "", True: "lwf ebll hat packnet"},
    "draws_randomly": {False: ""},
    "works_on_shards": {False: "", True: "none mas mas-local ewc ewc-online"},
    "penalises": {True: "", False: "none lwf ebll hat packnet gpm sgp ags-cl replay der"},
}
# Fields that came later: a record without one has this value, and the key of a run does not contain it.
LATER: dict[str, dict[str, Any]] = {
    **{name: {"alpha": "loss"} for name in ("ewc", "ewc-online", "imm")},
    **{name: {"damped": False} for name in ("lwf", "ebll")},
}


def spell(group: Group) -> str:
    marks = ("" if group.like_parameter else "~") + ("!" if group.changes_in_step else "")
    return group.name + marks + ("" if group.precision == "full" else f"/{group.precision}")


@pytest.mark.parametrize("name", SURFACE)
def test_names_defaults_and_groups(name: str) -> None:
    kind, (defaults, groups) = PRESERVERS[name], SURFACE[name]
    term = kind() if name != "packnet" else kind(**defaults)
    assert kind.name == name
    assert dataclasses.asdict(term) == defaults
    assert [spell(group) for group in kind.groups] == groups.split()
    assert set(term.init({"w": torch.zeros(2, 2)})) <= {group.name for group in kind.groups}
    assert kind.later == LATER.get(name, {})
    for promise, values in PROMISES.items():
        first = next(iter(values))
        wanted = next((value for value, names in values.items() if name in names.split()), first)
        assert (promise, getattr(term, promise)) == (promise, wanted)
        assert type(getattr(term, promise)) is type(wanted)


def test_shared_groups_and_the_name_in_the_papers_tables() -> None:
    assert [spell(group) for group in (MEMORY, HEAD, CURVATURE, COUNT)] == ["memory~", "head", "curvature~!", "count~"]
    assert Group("x") == Group("x", like_parameter=True, changes_in_step=False, precision="full")
    assert PRESERVERS["finetune"] is NoPreserver
    assert Preserver.role == "preserver"


def test_old_names() -> None:
    """What custom classes of earlier versions may still use."""
    assert (
        dict(
            zip(
                "how spares alike recordable turning turn evaluated identifies dropped kept_gate learn_gates coded".split(),
                "estimator alpha_objective same_strength capturable starts_phase begin_phase evaluated_parameters by_task drop_nodes "
                "hard_gate step_gates add_encoder".split(),
                strict=True,
            )
        )
        == RENAMED
    )
    assert {old: new.__name__ for old, new in FLAGS.items()} == dict(
        zip(
            "watches distils encodes projects turns evaluates drops owns gates".split(),
            "Observes Distils Encodes Projects Phased Evaluates Drops KnowsHeads Gated".split(),
            strict=True,
        )
    )
    term = PRESERVERS["mas"]()
    for old, new in RENAMED.items():
        if hasattr(type(term), new):
            with pytest.warns(DeprecationWarning, match=f"^MAS.{old} is now {new}$"):
                assert getattr(term, old) == getattr(term, new)
    for old, kind in FLAGS.items():
        with pytest.warns(DeprecationWarning, match=rf"^MAS.{old} is now isinstance\(…, {kind.__name__}\)$"):
            assert getattr(term, old) is isinstance(term, kind)
