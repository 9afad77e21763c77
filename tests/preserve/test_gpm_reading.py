"""Networks whose forward pass reads a weight in another way than by its layer: GPM must hold it, or go on training it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selfless
from selfless import GPM
from tests.keeper.nets import batches, seeded


class Reading(nn.Module):
    """A network whose forward pass reads the weight of its second layer in another way too, from task `since` on."""

    def __init__(self, read: Any, since: int = 0) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 20), nn.Linear(20, 20), nn.Linear(20, 3)
        self.read, self.since, self.task = read, since, 0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        return self.head(torch.relu(self.read(self, h) if self.task >= self.since else self.second(h)))


def _weights_that_move(model: Any, tasks: int) -> list[set[str]]:
    """Train with GPM; return the parameters that moved in each task."""
    keeper, moved = selfless.attach(model, GPM(0.9)), []
    for model.task in range(tasks):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for x, y in batches(model.task):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
            optimizer.step()
        keeper.consolidate(batches(model.task))
        moved.append({name for name, p in model.named_parameters() if not torch.equal(p, before[name])})
    return moved


FUNCTIONAL = {
    "F.linear": lambda m, h: F.linear(h, m.second.weight, m.second.bias),
    "in a list": lambda m, h: F.linear(h, torch.cat([m.second.weight, m.second.weight]))[:, :20] + m.second.bias,
    "beside its layer": lambda m, h: m.second(h) + F.linear(h * 3, m.second.weight),
}


@pytest.mark.parametrize("read", FUNCTIONAL.values(), ids=FUNCTIONAL)
def test_gpm_holds_weights_that_it_cannot_follow(read: Any) -> None:
    """F.linear(x, layer.weight) has no hook; without its inputs the weight must not move after the first task."""
    first, second = _weights_that_move(seeded(lambda: Reading(read)), tasks=2)
    assert "second.weight" in first
    assert "second.weight" not in second
    assert "first.weight" in second


def test_gpm_holds_a_weight_that_it_could_follow_before() -> None:
    first, second, third = _weights_that_move(seeded(lambda: Reading(FUNCTIONAL["beside its layer"], since=1)), tasks=3)
    assert "second.weight" in first & second
    assert "second.weight" not in third


MENTIONS = {
    "its type": lambda m, h: m.second(h.to(m.second.weight).type_as(m.second.weight)),
    "its size": lambda m, h: m.second(h + torch.zeros_like(m.second.weight)[0] + m.second.weight.new_zeros(20)),
    "its norm, logged": lambda m, h: (setattr(m, "norm", m.second.weight.norm()), m.second(h))[1],
    "its data": lambda m, h: m.second(h + next(m.parameters()).data.new_zeros(len(h), 20)),
    "its layer twice": lambda m, h: m.second(m.second(h)),
}


@pytest.mark.parametrize("read", MENTIONS.values(), ids=MENTIONS)
def test_gpm_trains_a_layer_whose_weight_is_only_mentioned(read: Any) -> None:
    _, second = _weights_that_move(seeded(lambda: Reading(read)), tasks=2)
    assert {"first.weight", "second.weight"} <= second
