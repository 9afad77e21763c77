"""Custom preservers written for the first interface still work, with warnings that tell the new names."""

from __future__ import annotations

import importlib
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import selfless
from selfless import MAS, SLNID, Run
from selfless.engine.learner import Learner
from selfless.importance import FunctionNorm, LayerNorms, LogLikelihood, measure
from selfless.network.layers import resolve
from selfless.preserve import Quadratic
from selfless.preserve.capabilities import Observes, Phased

NUMBERS = itertools.count()  # a new module for each test
OLD = """
from dataclasses import dataclass
from typing import ClassVar

import torch

from selfless.importance import FunctionNorm
from selfless.preserve import Preserver


@dataclass(frozen=True)
class Old(Preserver):
    name: ClassVar[str] = "old"
    watches = True
    turns = True
    alike = True
    stepped = ("path",)
    loose = ("phases",)
    strength: float = 1.0

    @property
    def how(self):
        return "per-batch"

    @property
    def spares(self):
        return FunctionNorm()

    def init(self, parameters):
        zeros = {n: torch.zeros_like(p) for n, p in parameters.items()}
        return {"path": zeros, "start": {}, "omega": {}, "phases": {"count": torch.zeros(())}}

    def observe(self, state, before, after, gradients):
        path = {n: state["path"][n] + (after[n] - before[n]).abs() for n in gradients}
        return {**state, "path": state["path"] | path}

    def turning(self, epoch, epochs):
        return epoch == 1

    def turn(self, state, parameters, epoch, epochs):
        return {**state, "phases": {"count": state["phases"]["count"] + 1}}, {}

    def penalty(self, state, parameters):
        moved = [(p - state["start"][n]).abs().sum() for n, p in parameters.items() if n in state["start"]]
        return torch.stack(moved).sum() if moved else torch.zeros(())

    def consolidate(self, state, parameters, omega):
        return {**state, "omega": {n: t.clone() for n, t in state["path"].items()}}
"""
OLD_GATES = """
from dataclasses import dataclass
from typing import ClassVar

import torch

from selfless.preserve import Preserver


@dataclass(frozen=True)
class Doors(Preserver):
    name: ClassVar[str] = "doors"
    gates: ClassVar[bool] = True
    turns: ClassVar[bool] = True
    evaluates: ClassVar[bool] = True
    identifies: ClassVar[bool] = True
    stepped: ClassVar[tuple[str, ...]] = ("steps",)
    loose: ClassVar[tuple[str, ...]] = ("place", "fresh", "now", "kept", "steps")
    strength: float = 0.0

    def check_network(self, buffers):
        assert not list(buffers), "no buffers"

    def wire(self, state, wiring):
        zero = torch.zeros(wiring.size)
        none = torch.zeros(0, wiring.size)
        return {"place": dict(wiring.place), "fresh": {"all": zero}, "now": {"all": zero.clone()}, "kept": {"all": none},
                "steps": {"count": torch.zeros(())}}

    def turning(self, epoch, epochs):
        return epoch == 0

    def turn(self, state, parameters, epoch, epochs):
        return {**state, "now": {"all": (state["fresh"]["all"] > 0).float()}}, {}

    def gate(self, state, share):
        return {name: state["now"]["all"][place] for name, place in state["place"].items()}

    def kept_gate(self, state, task):
        gates = state["now"]["all"] if task is None else state["kept"]["all"][task]
        return {name: gates[place] for name, place in state["place"].items()}

    def gate_penalty(self, state, gates):
        return next(iter(gates.values())).new_zeros(())

    def learn_gates(self, state, gradients, share, lr):
        return {**state, "steps": {"count": state["steps"]["count"] + 1}}

    def consolidate(self, state, parameters, omega):
        return {**state, "kept": {"all": torch.cat([state["kept"]["all"], state["now"]["all"].unsqueeze(0)])}}
"""
LOCAL = """
from dataclasses import dataclass
from typing import ClassVar

from selfless.preserve import {base}


@dataclass(frozen=True)
class Local({base}):
    name: ClassVar[str] = "local"
    local = True
    strength: float = 0.1
"""


def load(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """Import the module that has this text; return it with the warnings that its import gave."""
    name = f"first_interface_{next(NUMBERS)}"
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(name)
    assert {warning.category for warning in caught} <= {DeprecationWarning}
    return module, [str(warning.message) for warning in caught]


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """The class `Old`, and the warnings that its definition gave."""
    module, messages = load(OLD, tmp_path, monkeypatch)
    return module.Old, messages


@pytest.fixture
def doors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """The class `Doors`, and the warnings that its definition gave."""
    module, messages = load(OLD_GATES, tmp_path, monkeypatch)
    return module.Doors, messages


def test_a_warning_names_the_new_form_of_every_old_name(old: tuple[Any, list[str]]) -> None:
    _, messages = old
    renamed = {"how": "estimator", "spares": "alpha_objective", "alike": "same_strength", "turning": "starts_phase", "turn": "begin_phase"}
    assert {f"Old.{before} is now {after}; rename it" for before, after in renamed.items()} < set(messages)
    flags = [text for text in messages if "= True is now a base class" in text]
    assert [text.rpartition(".")[2] for text in flags] == ["Observes", "Phased"]
    (groups,) = [text for text in messages if "stepped and loose" in text]
    assert groups.endswith('write groups = (Group("path", changes_in_step=True), Group("phases", like_parameter=False),)')
    assert len(messages) == len(renamed) + len(flags) + 1


def test_the_new_names_find_the_old_members(old: tuple[Any, list[str]]) -> None:
    preserve = old[0](0.5)
    assert preserve.estimator == "per-batch"
    assert isinstance(preserve.alpha_objective, FunctionNorm)
    assert preserve.same_strength
    assert isinstance(preserve, Observes)
    assert isinstance(preserve, Phased)
    assert [preserve.starts_phase(epoch, 3) for epoch in range(3)] == [False, True, False]


def test_it_trains_in_a_loop(old: tuple[Any, list[str]]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    with pytest.warns(DeprecationWarning, match="does not declare the groups of its state"):  # "omega" is neither stepped nor loose
        keeper = selfless.attach(model, old[0](0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(16, 6), torch.arange(16) % 3
    for epoch in range(3):
        keeper.begin_epoch(epoch, 3, batches=1)
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + keeper.penalty((x, y))).backward()
        optimizer.step()
    assert keeper.state["path"]["0.weight"].max() > 0
    assert set(keeper.state["start"]) == set(dict(model.named_parameters()))
    assert float(keeper.state["phases"]["count"]) == 1
    keeper.consolidate([(x, y)])
    assert keeper.tasks == 1
    twin = selfless.attach(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), old[0](0.1))  # warns once only
    twin.load_state_dict(keeper.state_dict())
    assert_close(twin.state["omega"], keeper.state["omega"])


@pytest.mark.filterwarnings("ignore:Old does not declare:DeprecationWarning")
def test_it_trains_as_a_run_and_what_it_observes_is_kept(old: tuple[Any, list[str]], tasks_npz: str) -> None:
    run = Run(stream=tasks_npz, model="mlp-12", preserve=old[0](0.1), epochs=2, batch=50, lr=0.05)
    result = selfless.train(run, device="cpu")
    assert result.status == "done"
    free = [task["free_parameters"] for task in result.capacity]
    assert free[0] < 1  # Ω is the path
    assert sorted(free, reverse=True) == free


@pytest.mark.filterwarnings("ignore:Doors learns in the steps of an optimizer")
def test_old_gates_act_in_loops_and_runs(doors: tuple[Any, list[str]], tasks_npz: str) -> None:
    kind, messages = doors
    for capability in ("Gated", "Phased", "Evaluates", "Freezes"):
        assert any(text.endswith(f"capabilities.{capability}") for text in messages)
    learner = Learner(
        [Run(stream=tasks_npz, model="mlp-12", preserve=kind(0.0), epochs=2, batch=50, lr=0.05, seed=seed) for seed in (0, 1)]
    )
    assert all(result.status == "done" for result in learner.learn())
    kept = learner.fleet.parts[0].state["kept"]["all"]
    assert kept.shape[:2] == (2, 3)
    assert 0 < kept.mean() < 1
    assert learner.fleet.parts[0].state["steps"]["count"].tolist() == [18.0, 18.0]  # 3 tasks, 2 epochs, 3 batches
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    keeper = selfless.attach(model, kind(0.0))
    keeper.begin_epoch(0, 1, batches=1)
    keeper.consolidate([(torch.randn(3, 4), torch.zeros(3, dtype=torch.int64))])
    with keeper.evaluating(0), torch.no_grad():
        hidden = model[:2](torch.randn(64, 4))
    assert bool((hidden[:, keeper.state["kept"]["all"][0] == 0] == 0).all())
    with pytest.raises(AssertionError, match="no buffers"):
        selfless.attach(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)), kind(0.0))


def test_local_is_the_objective_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, messages = load(LOCAL.format(base="MAS"), tmp_path, monkeypatch)
    assert isinstance(module.Local(0.1).objective, LayerNorms)
    assert ["local = True is now an objective" in text for text in messages] == [True]
    with pytest.raises(TypeError, match=r"remove it and return selfless\.importance\.LayerNorms"):
        load(LOCAL.format(base="EWC"), tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "value"),
    [("how", "per-sample"), ("alike", False), ("owns", False), ("watches", True), ("local", False), ("stepped", ("path",)), ("loose", ())],
)
def test_old_attributes_can_still_be_read(name: str, value: object) -> None:
    with pytest.warns(DeprecationWarning, match=f"SI.{name} is now"):
        assert getattr(selfless.SI(1.0), name) == value
    with pytest.raises(AttributeError, match="'SI' object has no attribute 'nonsense'"):
        selfless.SI(1.0).nonsense  # noqa: B018


def test_the_objective_of_alpha_has_a_new_name() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), torch.randn(8, 4)
    batches, taps = [(x, torch.arange(8) % 3)], resolve(model, ["1"])
    new = measure(model, batches, LogLikelihood(), alpha_objective=FunctionNorm(), taps=taps)
    with pytest.warns(DeprecationWarning, match="alpha_objective"):
        old = measure(model, batches, LogLikelihood(), spares=FunctionNorm(), taps=taps)
    assert_close(old.alpha, new.alpha)


def test_members_that_cannot_be_adopted_are_named() -> None:
    with pytest.raises(TypeError, match=r"is now anchor\(state\), which returns selfless.functional.Anchor"):

        class Pulled(Quadratic):
            def anchor(self, state: Any, parameters: Any, step: Any) -> Any:  # type: ignore[override]
                return {}

    with pytest.warns(DeprecationWarning, match="not read any more"):

        class Pairs(SLNID):
            def pairs(self, n: int, like: Any, alpha: Any = None) -> Any:
                return None


class Sum:
    """An objective with no more than the first interface asked for: L = Σ f."""

    power = 1

    def targets(self, output: Any, labels: Any) -> Any:
        return [(None, None)]

    def value(self, output: Any, target: Any) -> Any:
        return output.sum(1)


class MeasuresSum(MAS):
    name = "measures-sum"

    @property
    def objective(self) -> Any:
        return Sum()


def test_an_objective_needs_no_more_than_before(tasks_npz: str) -> None:
    run = Run(stream=tasks_npz, model="mlp-8", preserve=MeasuresSum(0.1), epochs=1, batch=50)
    learner = Learner([run])
    assert learner.learn()[0].status == "done"
    assert all(omega.max() > 0 for omega in learner.fleet.parts[0].state["omega"].values())
