"""The keeper's state: saved, loaded, refused when damaged; capacity, copies, detaching."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import selfless
from selfless import EWC, MAS, SI, SLNI, SLNID, SNI, functional
from tests.keeper.nets import batches, seeded, sequential, train
from tests.small_nets import made, mlp, rand


def test_follows_the_model_to_another_device_and_dtype() -> None:
    model = seeded()
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3), layers=["fc1"])
    keeper.consolidate(batches())
    assert_close(keeper.state_dict()["alpha.fc1"], keeper.alpha["fc1"])
    model.to("meta")
    keeper.follow_device()
    assert keeper.state["omega"]["fc1.weight"].device.type == "meta"
    assert keeper.alpha["fc1"].device.type == "meta"


def test_state_dict_round_trip_and_mismatch() -> None:
    model = seeded()
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3), layers=["fc1", "fc2"])
    keeper.consolidate(batches())
    saved = keeper.state_dict()
    fresh = selfless.attach(copy.deepcopy(model), MAS(0.1), SLNID(1e-3), layers=["fc1", "fc2"])
    fresh.load_state_dict(saved)
    assert fresh.tasks == 1
    for key, value in fresh.state_dict().items():
        assert_close(value, saved[key])
    with pytest.raises(ValueError, match="preserver 'mas', but this keeper has 'ewc'"):
        selfless.attach(seeded(), EWC(), layers=["fc1"]).load_state_dict(saved)
    with pytest.raises(ValueError, match="attach with the same layers"):
        selfless.attach(seeded(), MAS(), layers=["fc1"]).load_state_dict(saved)
    small = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    other = selfless.attach(small, MAS(0.1))
    with pytest.raises(ValueError, match="in the model"):
        other.load_state_dict(saved)
    assert other.tasks == 0


def test_detach_context_and_repr() -> None:
    model, (x, _) = seeded(sequential), batches()[0]
    with selfless.attach(model, MAS(0.1), SLNID(1e-3)) as keeper:
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        keeper.anchor_with(opt)
        assert repr(keeper).startswith("Keeper(MAS(strength=0.1")
        assert "layers=[0, 2], anchor=implicit, tasks=0" in repr(keeper)
    with pytest.raises(RuntimeError, match="was detached"):
        keeper.penalty()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model(x)


def test_capacity_counts_what_is_free() -> None:
    model = seeded(sequential)
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3))
    assert keeper.capacity().free_parameters == 1.0
    keeper.consolidate(batches())
    omega = torch.cat([t.flatten() for t in keeper.state["omega"].values()])
    found = keeper.capacity(threshold=0.05)
    assert found.free_parameters == pytest.approx(float((omega < 0.05).double().mean()))
    assert found.neurons["0"].total == 16
    assert "parameters" in str(found)
    plain = selfless.attach(seeded(sequential), None, SLNID(1e-3))
    plain.consolidate(batches())
    neurons = plain.capacity(threshold=0.05)  # without a preserver, the neurons alone
    assert (neurons.parameters, neurons.neurons, neurons.tasks, neurons.threshold) == ({}, found.neurons, 1, 0.05)
    assert neurons.layers.keys() == found.layers.keys() == {"0", "2"}


def test_a_keeper_is_not_copied() -> None:
    keeper = selfless.attach(seeded(), MAS(0.1))
    for how in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="load_state_dict"):
            how(keeper)
    copy.deepcopy(keeper.model)


def test_copies_and_pickles_of_the_model_are_free_of_the_keeper() -> None:
    model, x = made(mlp), rand(9, 6)
    keeper = selfless.attach(model, sparsify=SNI(1.0))
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    model(x)
    twin(x * 10)
    loaded(x * 10)
    h = F.relu(F.linear(x, model[0].weight, model[0].bias))
    assert_close(keeper.penalty(), functional.sni(h) + functional.sni(F.relu(F.linear(h, model[2].weight, model[2].bias))))


def test_a_keeper_and_its_model_are_freed() -> None:
    models = [made(mlp), made(mlp)]
    keepers = [selfless.attach(m, SI(1.0), SLNID(1e-3), inject=inject) for m, inject in zip(models, (False, True), strict=True)]
    for model, keeper in zip(models, keepers, strict=True):
        cost = model(rand(4, 6)).sum()
        (cost if keeper.injector is not None else keeper.penalty()).backward()
    gone = [weakref.ref(one) for one in (*models, *keepers)]
    del keepers, keeper
    gc.collect()
    assert [ref() is None for ref in gone] == [False, False, True, True]
    for model in models:
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    del models, model, cost
    gc.collect()
    assert all(ref() is None for ref in gone)


@pytest.mark.parametrize(("layers", "heads"), [("auto", ()), ("all", ()), (["1"], ()), ("auto", ["3"])])
def test_a_keeper_describes_the_layers_that_it_has(layers: Any, heads: Any) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))

    model, x = made(build), rand(5, 1, 6)
    keeper = selfless.attach(model, MAS(0.1), SLNI(1e-3), layers, heads=heads)
    model(x)
    assert str(keeper.describe()) == str(selfless.describe(model, layers, heads=heads, batch=x))


def test_damaged_states_are_refused_and_channels_last_is_saved() -> None:
    from safetensors.torch import load, save

    model, x = made(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))), rand(3, 2, 6, 6)
    model.to(memory_format=torch.channels_last)
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3), layers=["1"])
    keeper.consolidate([x])
    good = load(save(keeper.state_dict()))
    keeper.load_state_dict(good)
    for change, message in (
        ({"alpha.1": torch.ones(7)}, "has 4 neurons"),
        ({"preserve.omega.3.bias": None}, "only one of Ω and θ"),
        ({"preserve.other.3.bias": torch.ones(3)}, r"has 'preserve\.other\.3\.bias', which is unknown to this keeper"),
        ({"preserve.omega.3.bias": torch.full((3,), float("nan"))}, "finite"),
        ({"preserve.omega.3.bias": torch.ones(4)}, r"is \(4,\) in the state"),
        ({"extra": torch.ones(1)}, "unknown to this keeper"),
    ):
        bad = {k: v for k, v in (good | change).items() if v is not None}
        with pytest.raises(ValueError, match=message):
            keeper.load_state_dict(bad)
    assert keeper.tasks == 1


def test_ewc_on_a_fully_frozen_model_still_tells_its_capacity() -> None:
    model, x = made(mlp), rand(9, 6)
    keeper = selfless.attach(model, EWC(1.0))
    keeper.consolidate([(x, torch.arange(9) % 3)])
    model.requires_grad_(False)
    assert keeper.capacity().parameters["0.weight"].total == 48


def test_si_mid_task_state_round_trips() -> None:
    x, y = rand(20, 6, dtype=torch.float64), torch.arange(20) % 3
    ends = []
    for stop in (False, True):
        model = made(mlp, dtype=torch.float64)
        keeper = selfless.attach(model, SI(1.0))
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for k in range(4):
            if stop and k == 2:
                saved = keeper.state_dict()
                keeper.detach()
                keeper = selfless.attach(model, SI(1.0))
                keeper.load_state_dict(saved)
            opt.zero_grad()
            (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
            opt.step()
        keeper.consolidate([x])
        ends.append(keeper.state["omega"])
    for name in ends[0]:
        assert_close(ends[1][name], ends[0][name])


def test_a_state_that_is_loaded_in_inference_mode_can_be_trained_on() -> None:
    model, task = seeded(), batches()
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3), layers=["fc1"])
    keeper.consolidate(task)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.inference_mode():
        keeper.anchor_with(optimizer).load_state_dict(keeper.state_dict())
    train(model, keeper, optimizer, task, epochs=1)
    keeper.consolidate(task)
    assert keeper.tasks == 2
