"""What a keeper says aloud, once, with its remedy."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selfless
from selfless import MAS, SLNID, SNI, LwF, PackNet
from selfless.keeper.notices import SILENT_STEPS, Notices
from tests.keeper.nets import Net, batches, seeded, sequential, train
from tests.preserve.heads import NAMES, data, made


def optimizer_of(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


@pytest.mark.parametrize("act", [nn.Tanh(), nn.GELU(), nn.LeakyReLU()])
@pytest.mark.parametrize("inject", [False, True])
def test_signed_activations(act: nn.Module, inject: bool) -> None:
    def step(sparsify: Any) -> None:
        model = seeded(lambda: nn.Sequential(nn.Linear(6, 16), act, nn.Linear(16, 3)))
        keeper = selfless.attach(model, None, sparsify, inject=inject)
        for x, y in batches(count=2):  # said once, not in every step
            loss = F.cross_entropy(model(x), y)
            (loss if inject else loss + keeper.penalty()).backward()

    with pytest.warns(UserWarning, match=r"'0' has negative activations.*SNI\(0\.01, absolute=True\)") as said:
        step(SNI(0.01))
    assert len(said) == 1
    step(SNI(0.01, absolute=True))


def test_a_task_without_its_epochs() -> None:
    model = seeded()
    keeper = selfless.attach(model, PackNet(0.5))
    for task in range(2):
        train(model, keeper, optimizer_of(model), batches(task), epochs=1)
        if task == 0:
            with pytest.warns(UserWarning, match=r"PackNet has phases.*keeper\.begin_epoch.*Call it before every epoch"):
                keeper.consolidate(batches(task))
        else:
            keeper.consolidate(batches(task))
    quiet = seeded()
    keeper = selfless.attach(quiet, PackNet(0.5))
    for epoch in range(2):
        keeper.begin_epoch(epoch, 2)
        train(quiet, keeper, optimizer_of(quiet), batches(), epochs=1)
    keeper.consolidate(batches())
    plain = seeded()
    keeper = selfless.attach(plain, LwF(1.0))  # without a warm-up it has no phases
    train(plain, keeper, optimizer_of(plain), batches(), epochs=1)
    keeper.consolidate(batches())


def test_a_warm_up_that_is_left_out() -> None:
    """The remedy depends on what is missing: the names of the heads, or the epochs."""
    for heads, remedy in (
        ((), r"name the heads of the tasks: attach\(…, heads=\[…\]\)"),
        (NAMES, r"call keeper\.begin_epoch\(epoch, epochs\)"),
    ):
        model = made()
        keeper = selfless.attach(model, LwF(0.1, warmup=1), heads=heads)
        optimizer, (x, y) = optimizer_of(model), data(0, 1)[0]
        for task in range(2):
            (F.cross_entropy(model(x, task), y) + keeper.penalty((x, y))).backward()
            optimizer.step()
            if task == 0:
                keeper.consolidate([(x, y)], forward=lambda m, b: m(b[0], 0))
            else:
                with pytest.warns(UserWarning, match=rf"no warm-up: {remedy}.*, or attach 'lwf:0\.1', which has no warm-up"):
                    keeper.consolidate([(x, y)], forward=lambda m, b: m(b[0], 1))


def test_running_statistics_that_follow_a_later_task() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    model = seeded(build)
    keeper = selfless.attach(model, MAS(0.1))
    train(model, keeper, optimizer_of(model), batches(), epochs=1)  # the first task says nothing
    keeper.consolidate(batches())
    with pytest.warns(UserWarning, match=r"'1' follow task 2.*norm\.eval\(\)") as said:
        train(model, keeper, optimizer_of(model), batches(1), epochs=1)
    assert len(said) == 1
    keeper.detach()
    keeper = selfless.attach(model, MAS(0.1))
    keeper.consolidate(batches())
    model.train()
    model[1].eval()
    train(model, keeper, optimizer_of(model), batches(1), epochs=1)


def test_attaching_twice() -> None:
    model = seeded()
    first = selfless.attach(model, MAS(0.1))
    with pytest.warns(UserWarning, match=r"already has a keeper.*detach\(\).*sum of terms"):
        selfless.attach(model, None, SLNID(1e-3))
    gc.collect()
    first.detach()
    selfless.attach(model, MAS(0.1)).detach()
    with selfless.attach(model, MAS(0.1)):
        selfless.attach(seeded(), MAS(0.1))  # another model


@pytest.mark.parametrize("term", [MAS(0.1), LwF(1.0)])
def test_a_state_that_is_loaded_before_the_weights(term: Any) -> None:
    model = seeded()
    keeper = selfless.attach(model, term)
    keeper.consolidate(batches())
    other = seeded(seed=1)
    again = selfless.attach(other, term)
    with pytest.warns(UserWarning, match="load the weights of the model before the state"):
        again.load_state_dict(keeper.state_dict())
    again.detach()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.fc1.weight.mul_(1.1)  # training went on
    selfless.attach(other, term).load_state_dict(keeper.state_dict())


def test_layers_that_auto_leaves_out() -> None:
    class Odd(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.fc2(F.relu(self.fc1(x))) ** 2)

    model = seeded(Odd)
    keeper = selfless.attach(model, None, SLNID(1e-3))
    with pytest.warns(UserWarning, match=r"1 of 2 hidden layers are left out.*fc2.*layers=") as said:
        model(batches()[0][0])
    model(batches()[0][0])
    assert len(said) == 1
    assert list(keeper.taps) == ["fc1"]


@pytest.mark.parametrize("inject", [False, True])
def test_a_strength_that_silences_a_layer(inject: bool) -> None:
    model = seeded(sequential)
    keeper = selfless.attach(model, None, SLNID(1e-3), inject=inject)
    x, y = batches()[0]
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
        inputs = F.linear(x, model[0].weight)[:, 0]
        model[0].bias[0] = -inputs.topk(2).values.mean()  # one neuron is active, in one sample

    def step() -> None:
        loss = F.cross_entropy(model(x), y)
        (loss if inject else loss + keeper.penalty()).backward()

    for _ in range(SILENT_STEPS - 1):
        step()
    with pytest.warns(
        UserWarning,
        match=r"layer '0' is almost silent: in the last 20 steps 0\.05 of .*: lower λ of the sparsifier, or lower the learning rate",
    ):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()


def test_an_overflow_names_the_strength_too() -> None:
    model = seeded(sequential)
    keeper = selfless.attach(model, None, SLNID(1e-3))
    model(torch.full((4, 6), torch.inf))
    with pytest.raises(ValueError, match="lower the learning rate or λ"):
        keeper.penalty()


def test_float16_without_a_scale() -> None:
    model = seeded(sequential).half()
    keeper = selfless.attach(model, None, SLNID(1e-3), inject=True)
    with pytest.warns(UserWarning, match=r"keeper\.scale = scaler"):
        model(batches()[0][0].half())
    keeper.scale = 1024.0
    model(batches()[0][0].half())


def test_a_layer_with_a_few_active_neurons_left_is_almost_silent() -> None:
    notices = Notices([])
    for step in range(2 * SILENT_STEPS):
        notices.check_activity({"sparse": 0.3, "one step": 0.0 if step % 4 else 1.0})
    for step in range(SILENT_STEPS - 1):
        notices.check_activity({"dying": 0.0 if step % 2 else 0.2})
    with pytest.warns(UserWarning, match=r"layer 'dying' is almost silent: in the last 20 steps 0\.1 of its neurons were active"):
        notices.check_activity({"dying": 0.0})
