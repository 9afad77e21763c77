"""inject=True in models that are called in other ways than model(x), or that have little to train."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import MAS, SI, SLNID
from tests.keeper.nets import batches, seeded, sequential
from tests.keeper.test_inject import assert_same_gradients, twins

CALLS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "in evaluation mode": lambda model, x: model.eval()(x),
    "by its forward": lambda model, x: model.forward(x),
    "by its parts": lambda model, x: F.linear(F.relu(model[2](F.relu(model[0](x)))), model[4].weight, model[4].bias),
}


@pytest.mark.parametrize("sparsify", [None, SLNID(0.1)], ids=str)
@pytest.mark.parametrize("way", CALLS)
def test_the_anchor_acts_however_the_model_is_called(way: str, sparsify: Any) -> None:
    """As where batch norm is frozen, or a wrapper calls a network that it holds. Layers that no hook sees are not inhibited."""
    call, (x, y) = CALLS[way], batches(1)[0]
    model, plain, _, _ = twins(MAS(3.0), sparsify if way == "by its forward" else None, build=sequential)
    _, _, twin, injecting = twins(MAS(3.0), sparsify, build=sequential)
    injecting.load_state_dict(injecting.state_dict())
    (F.cross_entropy(call(model, x), y) + plain.penalty()).backward()
    F.cross_entropy(call(twin, x), y).backward()
    assert_same_gradients(model, twin)


def test_a_path_is_followed_at_strength_zero() -> None:
    model = seeded()
    twin = copy.deepcopy(model)
    keepers = [selfless.attach(model, SI(0.0)), selfless.attach(twin, SI(0.0), inject=True)]
    for m, keeper in zip((model, twin), keepers, strict=True):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for x, y in batches():
            optimizer.zero_grad()
            loss = F.cross_entropy(m(x), y)
            (loss if keeper is keepers[1] else loss + keeper.penalty()).backward()
            optimizer.step()
        keeper.consolidate(batches())
    for name, value in keepers[0].state_dict().items():
        assert_close(keepers[1].state_dict()[name], value, msg=lambda text, name=name: f"{name}: {text}")


def test_a_model_without_trainable_parameters_is_said() -> None:
    _, _, twin, _ = twins(None, SLNID(0.1))
    x, y = batches(1)[0]
    twin.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        F.cross_entropy(twin(x.requires_grad_()), y).backward()
