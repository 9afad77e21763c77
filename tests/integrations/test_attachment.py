"""The keeper of a callback, without any library: when it is attached, what it saves, which optimizers it uses."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from selfless.integrations.attachment import Attachment


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def made(preserve: Any = "mas:1", **changes: Any) -> Attachment:
    return Attachment(**({"anchor": "implicit", "forward": None, "loss": None, "options": {"preserve": preserve}} | changes))


BATCHES = [torch.linspace(-1, 1, 24).view(6, 4)]


def test_a_state_waits_for_the_model_and_moves_to_another_one() -> None:
    one = made()
    assert not one.is_attached
    assert one.state() == {}
    with pytest.raises(RuntimeError, match="there is no keeper yet: it is attached to the model when training begins"):
        _ = one.keeper
    model = net()
    keeper = one.attach(model)
    assert one.is_attached
    assert one.attach(model) is keeper
    one.begin_epoch(3, 5, 10)
    assert int(one.state()["first_epoch"]) == 3
    one.end_task(BATCHES)
    assert "first_epoch" not in one.state()
    assert one.log()["selfless/tasks"] == 1.0
    with one.evaluating(0) as shown:
        assert shown is model

    two = made()
    two.load(one.state())
    assert not two.is_attached
    assert two.state().keys() == one.state().keys()
    assert two.attach(net()).tasks == 1
    assert_close(two.state(), one.state())
    other = net()
    moved = one.attach(other)  # of another model: the old one is let go
    assert moved.model is other
    assert moved.tasks == 1


def test_a_copy_takes_the_state_and_finds_its_model_later() -> None:
    one = made(forward=lambda model, batch: model(batch))
    assert copy.deepcopy(made()).state() == {}
    one.attach(net())
    one.end_task(BATCHES)
    one.begin_epoch(7, 9, math.inf)
    again = copy.copy(one)
    assert not again.is_attached
    assert again.attach(net()).tasks == 1
    assert_close(again.state(), one.state())
    assert int(again.state()["first_epoch"]) == 7


@pytest.mark.parametrize("anchor", ["implicit", "explicit"])
def test_only_optimizers_of_the_model_anchor(anchor: Any) -> None:
    one, model, other = made(anchor=anchor), net(), nn.Linear(2, 2)
    one.attach(model)
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    one.anchor_with([theirs, mine])
    assert one.keeper.implicit is (anchor == "implicit")
    with pytest.raises(ValueError, match="no optimizer has a trainable parameter of the model that the keeper is attached to"):
        one.anchor_with([theirs])


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ValueError, match="anchor is 'soft'; choose 'implicit' or 'explicit'"):
        made(anchor="soft")
    endless = made("packnet:0.5")
    endless.attach(net())
    with pytest.raises(ValueError, match=r"packnet.* has phases within a task, which need a number of epochs; give the trainer one"):
        endless.begin_epoch(0, None, None)
    with pytest.raises(ValueError, match="has phases within a task"):
        endless.begin_epoch(0, math.inf, 3)
    plain = made()
    plain.attach(net())
    plain.begin_epoch(0, None, None)  # a method without phases does not need it
