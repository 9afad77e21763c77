"""Batches without samples: they add nothing to a mean."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import selfless


@pytest.mark.parametrize("preserve", ["mas:1", "ewc:1", "mas:1,estimator=per-batch"])
def test_an_empty_batch_adds_nothing(preserve: str) -> None:
    x, y = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.arange(5) % 2
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    states = []
    for batches in ([(x, y)], [(x[:0], y[:0]), (x, y), (x[:0], y[:0])]):
        keeper = selfless.attach(model, preserve, "slnid:0.1")
        keeper.consolidate(batches)
        states.append(keeper.state_dict())
        keeper.detach()
    for name, value in states[0].items():
        assert_close(states[1][name], value, msg=lambda text, name=name: f"{name}: {text}")
