"""Optimizers that come and go: the anchor follows whichever steps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing import assert_close

import selfless
from selfless import MAS, SI
from tests.small_nets import made, mlp, rand


def test_a_new_optimizer_is_anchored_too() -> None:
    """A fresh optimizer a task is common; forgetting to name it must not silently leave the network unprotected."""
    model, x = made(mlp), rand(20, 6)
    keeper = selfless.attach(model, MAS(1e6))
    keeper.anchor_with(torch.optim.SGD(model.parameters(), lr=0.1))
    keeper.consolidate([x])
    before = model[0].weight.detach().clone()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        opt.zero_grad()
        (F.cross_entropy(model(x), torch.arange(20) % 3) + keeper.penalty()).backward()
        opt.step()
    assert (model[0].weight - before)[keeper.state["omega"]["0.weight"] > 1e-3].abs().max() < 1e-4


def test_the_kept_shares_follow_the_optimizer() -> None:
    """Freezing, other optimizers and moved parameters: the anchor pulls what the stepping optimizer holds, at its rate."""
    model, x = made(mlp), rand(20, 6)
    keeper = selfless.attach(model, MAS(10.0))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper.anchor_with(opt)
    keeper.consolidate([x])
    for frozen in (0, 2):
        for k in (0, 2):
            model[k].weight.requires_grad_(k != frozen)
        opt.step()
    model.requires_grad_(True)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    held = model[2].weight.detach().clone()
    torch.optim.SGD([model[0].weight], lr=0.1).step()
    assert_close(model[2].weight.detach(), held)


def test_a_keeper_that_is_collected_in_another_optimizers_step_does_not_disturb_it() -> None:
    """Hooks must not go away while torch walks through them: the first hook of the step collects keepers that came after it."""
    gone: list[selfless.Keeper] = []

    def collect(*_: Any) -> None:
        gone.clear()
        gc.collect()

    handles = [register_optimizer_step_post_hook(collect)]
    model, x, y = made(mlp), rand(20, 6), torch.arange(20) % 3
    gone += [selfless.attach(made(mlp), SI(1.0)) for _ in range(3)]
    watched = [weakref.ref(other) for other in gone]
    keeper = selfless.attach(model, SI(1.0))
    handles.append(register_optimizer_step_post_hook(lambda *_: None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert not any(other() for other in watched)
    assert all(path.abs().max() > 0 for path in keeper.state["path"].values())  # it saw the step
