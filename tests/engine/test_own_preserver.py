"""A preserver of one's own, with a penalty that is no Σ Ω(θ − θ*)²: it acts in loops, alone and in fleets, whatever the anchor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

import selfless
from selfless import Run
from selfless.engine.learner import Learner
from selfless.preserve import Preserver, State


@dataclass(frozen=True)
class Close(Preserver):
    name: ClassVar[str] = "close"
    strength: float = 1.0

    def init(self, parameters: Mapping[str, Tensor]) -> State:
        return {"anchor": {}}

    def penalty(self, state: State, parameters: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(p - state["anchor"][n]).abs().sum() for n, p in parameters.items()]).sum()

    def consolidate(self, state: State, parameters: Mapping[str, Tensor], omega: Mapping[str, Tensor]) -> State:
        return {"anchor": {n: p.detach().clone() for n, p in parameters.items()}}


@pytest.mark.parametrize("anchor", ["implicit", "explicit"])
def test_it_acts_in_a_fleet(tasks_npz: str, anchor: Literal["implicit", "explicit"]) -> None:
    runs = [Run(stream=tasks_npz, model="mlp-12", preserve=Close(s), epochs=3, batch=10, lr=0.05, anchor=anchor) for s in (0.0, 1e-3, 10.0)]
    learner = Learner(runs)
    moved: list[Tensor] = []
    weight = learner.fleet.trained["fc1.weight"]
    consolidate = learner.fleet.consolidate

    def watched() -> None:
        moved.append(weight.detach().clone())
        consolidate()

    learner.fleet.consolidate = watched  # type: ignore[method-assign]
    learner.learn()
    free, held, tied = ((moved[1] - moved[0])[m].abs().sum().item() for m in range(3))
    assert free > held > 0
    assert tied != free


def test_it_acts_in_a_loop_that_is_anchored() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    keeper = selfless.attach(model, Close(0.1))
    keeper.anchor_with(torch.optim.SGD(model.parameters(), lr=0.1))
    keeper.consolidate([(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64))])
    with torch.no_grad():
        model.weight.add_(1.0)
    assert keeper.penalty().item() == pytest.approx(0.1 * 8)
