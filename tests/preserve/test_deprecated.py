"""Custom preservers written for the first interface still work, with warnings that tell the new names."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selfless
from selfless.importance import FunctionNorm
from selfless.preserve.capabilities import Observes, Phased

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
    strength: float = 1.0

    @property
    def how(self):
        return "per-batch"

    @property
    def spares(self):
        return FunctionNorm()

    def init(self, parameters):
        zeros = {n: torch.zeros_like(p) for n, p in parameters.items()}
        return {"path": zeros, "start": {}, "phases": {"count": torch.zeros(())}}

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
"""


@pytest.fixture
def old() -> tuple[Any, list[str]]:
    """The class, and the warnings that its definition gave."""
    names: dict[str, Any] = {"__name__": "tests_old_preserver"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(OLD, "old.py", "exec", dont_inherit=True), names)
    assert {warning.category for warning in caught} == {DeprecationWarning}
    return names["Old"], [str(warning.message) for warning in caught]


def test_every_old_name_is_told_with_the_new_one(old: tuple[Any, list[str]]) -> None:
    _, told = old
    renamed = {"how": "estimator", "spares": "alpha_objective", "alike": "same_strength", "turning": "starts_phase", "turn": "begin_phase"}
    assert {f"Old.{before} is now {after}; rename it" for before, after in renamed.items()} < set(told)
    flags = [text for text in told if "= True is now a base class" in text]
    assert [text.rpartition(".")[2] for text in flags] == ["Observes", "Phased"]
    assert len(told) == len(renamed) + len(flags)


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
