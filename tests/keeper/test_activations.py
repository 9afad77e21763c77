"""Activations that are hard to follow: in place, functional, shared, checkpointed, copied."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import MAS, SLNID, SNI, L1Rep, Maxout, functional
from selfless.engine.learner import Learner
from tests.small_nets import Net, made, mlp, rand


@pytest.mark.parametrize(
    ("build", "layer", "x", "n"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Flatten(), nn.Linear(8 * 20, 3)), "1", rand(3, 5, 4, 6), 8),
        (lambda: nn.Sequential(nn.Conv1d(2, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)), "2", rand(3, 2, 10), 6),
        (lambda: nn.Sequential(nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)), "0", rand(3, 2, 10), 6),
    ],
)
def test_the_neuron_axis_is_that_of_the_layer_behind(build: Any, layer: str, x: Tensor, n: int) -> None:
    model = made(build)
    keeper = selfless.attach(model, MAS(), SLNID(1.0, absolute=True), layers=[layer])
    model(x)
    found = keeper.collector.take()[layer]
    assert found.shape[1] == n
    model(x)
    keeper.penalty()
    keeper.consolidate([x])
    assert keeper.alpha[layer].shape == (n,)


def test_functional_conv1d_counts_channels_from_the_first_pass_on() -> None:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv1d(2, 6, 3), nn.Linear(48, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.conv(x)).flatten(1))

    model, x = made(Conv), rand(3, 2, 10)
    keeper = selfless.attach(model, sparsify=SNI(1.0), layers=["conv"])
    want = functional.sni(F.relu(F.conv1d(x, model.conv.weight, model.conv.bias)).transpose(1, 2))
    for _ in range(2):
        model(x)
        assert_close(keeper.penalty(), want)


def test_maxout_with_a_discount() -> None:
    model, x = made(lambda: nn.Sequential(nn.Linear(6, 16), Maxout(2), nn.Linear(8, 3))), rand(9, 6)
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-2, absolute=True))
    for _ in range(2):
        model(x)
        keeper.penalty().backward()
        keeper.consolidate([x])
    assert keeper.alpha["0"].shape == (8,)


@pytest.mark.parametrize(
    "act",
    [
        lambda x: F.silu(x, inplace=True),
        lambda x: F.leaky_relu(x, 0.2, inplace=True),
        lambda x: x.relu_(),
        lambda x: x.clamp_(min=0.0),
        nn.SiLU(inplace=True),
        nn.ELU(inplace=True),
    ],
)
def test_in_place_activations_are_read_not_disturbed(act: Any) -> None:
    plain, model, x = made(lambda: Net(act)), made(lambda: Net(act)), rand(9, 6)
    keeper = selfless.attach(model, sparsify=L1Rep(1.0), layers=["fc1"])
    for _ in range(3):
        out = model(x)
        assert_close(out, plain(x))
        h = act(F.linear(x, plain.fc1.weight, plain.fc1.bias))
        value = keeper.penalty()
        assert_close(value, functional.l1_rep(h))
        (out.sum() + value).backward()


def test_a_custom_in_place_module_runs_once() -> None:
    class Leak(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            return t.mul_(torch.where(t > 0, 1.0, 0.1))

    plain, model, x = made(lambda: Net(Leak())), made(lambda: Net(Leak())), rand(9, 6)
    keeper = selfless.attach(model, sparsify=SNI(1.0, absolute=True), layers=["fc1"])
    for _ in range(3):
        assert_close(model(x), plain(x))
        keeper.penalty()


def test_checkpointing_with_functional_activations() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checked(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(checkpoint(lambda x: F.gelu(self.fc1(x)), x, use_reentrant=False))

    plain, model, x = made(lambda: Net(F.gelu)), made(Checked), rand(9, 6)
    one, two = (selfless.attach(m, sparsify=L1Rep(1.0), layers=["fc1"]) for m in (plain, model))
    for _ in range(3):
        for m, keeper in ((plain, one), (model, two)):
            m.zero_grad()
            (m(x).sum() + keeper.penalty()).backward()
        assert_close(model.fc1.weight.grad, plain.fc1.weight.grad)


def test_the_penalty_runs_no_checkpointed_block_again() -> None:
    """A checkpointed block runs in the forward and in the backward pass, and gradients accumulated over two batches are those without."""
    from torch.utils.checkpoint import checkpoint

    class Checked(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(checkpoint(lambda x: F.gelu(self.fc1(x)), x, use_reentrant=False))

    models = made(lambda: Net(F.gelu)), made(Checked)
    keepers = [selfless.attach(m, sparsify=L1Rep(1.0), layers=["fc1"]) for m in models]
    runs = []
    models[1].fc1.register_forward_hook(lambda *_: runs.append(1))
    for step in range(3):
        for model, keeper in zip(models, keepers, strict=True):
            model.zero_grad()
            for batch in range(2):
                loss = model(rand(9, 6, seed=2 * step + batch)).sum()
                before = len(runs)
                penalty = keeper.penalty()
                assert len(runs) == before
                ((loss + penalty) / 2).backward()
        assert_close(models[1].fc1.weight.grad, models[0].fc1.weight.grad)
    assert len(runs) == 3 * 2 * 2


def test_a_first_pass_in_eval_mode_or_that_fails_does_not_count() -> None:
    model, x = made(Net), rand(9, 6)
    keeper = selfless.attach(model, sparsify=SNI(1.0), layers=["fc1"])
    model.eval()
    with torch.no_grad():
        model(x * 100)
    with pytest.raises(RuntimeError):
        model.train()(rand(2, 5))
    copy.deepcopy(model)(x * 10)
    model(x)
    assert_close(keeper.penalty(), functional.sni(F.relu(F.linear(x, model.fc1.weight, model.fc1.bias))))


def test_passes_of_different_length_and_passes_before_a_step() -> None:
    model = made(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    keeper = selfless.attach(model, sparsify=L1Rep(1.0), layers=["1"])
    model(rand(4, 5, 6))
    model(rand(4, 7, 6))
    keeper.penalty().backward()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model(rand(4, 6)).sum().backward()  # a warm-up step without a penalty
    opt.step()
    model(rand(4, 6))
    keeper.penalty().backward()


def test_multi_head_perceptrons_under_auto() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
            self.heads = nn.ModuleList([nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)) for _ in range(2)])

        def forward(self, x: Tensor, task: int) -> Tensor:
            return self.heads[task](self.body(x))

    model, x = made(Heads), rand(9, 6)
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3))
    for task in range(2):
        with nullcontext() if task else pytest.warns(UserWarning, match=r"1 of 4 hidden layers are left out.*heads\.0\.2.*heads="):
            model(x, task)
        keeper.penalty().backward()
        keeper.consolidate([(x,)], forward=lambda m, b, t=task: m(b[0], t))
    assert set(keeper.alpha) == {"body.0", "heads.0.0", "heads.1.0"}


def test_a_shared_activation_module_serves_each_layer_apart() -> None:
    relu = nn.ReLU()
    model, x = made(lambda: nn.Sequential(nn.Linear(6, 8), relu, nn.Linear(8, 5), relu, nn.Linear(5, 3))), rand(9, 6)
    keeper = selfless.attach(model, MAS(0.1), SLNID(1.0))
    h1 = F.relu(F.linear(x, model[0].weight, model[0].bias))
    h2 = F.relu(F.linear(h1, model[2].weight, model[2].bias))
    for _ in range(2):
        model(x)
        assert_close(keeper.penalty(), functional.slni(h1) + functional.slni(h2))
    keeper.consolidate([x])
    assert {n: len(a) for n, a in keeper.alpha.items()} == {"0": 8, "2": 5}
    keeper.detach()
    keeper = selfless.attach(model, sparsify=SNI(1.0), layers=["1"])
    model(x)
    with pytest.raises(RuntimeError, match="serves several layers"):
        keeper.penalty()


@pytest.mark.parametrize("inject", [True, False])
def test_an_empty_batch_has_no_penalty(inject: bool) -> None:
    model = made(mlp)
    keeper = selfless.attach(model, MAS(0.1), SNI(1.0), inject=inject)
    for rows in (4, 0):  # the first one prepares the next
        loss = model(rand(rows, 6)).sum()
        if rows:
            (loss if inject else loss + keeper.penalty()).backward()
    with pytest.raises(ValueError, match="got no samples, so its penalty is not defined; skip empty batches"):
        loss.backward() if inject else keeper.penalty()


def test_the_penalty_keeps_float64() -> None:
    model = made(mlp, dtype=torch.float64)
    keeper = selfless.attach(model, MAS(0.1), SNI(1.0))
    model(rand(4, 6, dtype=torch.float64))
    assert keeper.penalty().dtype == torch.float64


class Late(nn.Module):
    """All layers are registered first, their activations after them: the order does not tell which belongs to which."""

    hidden = ("act1", "act2")

    def __init__(self, outputs: int = 3, input_shape: tuple[int, int, int] = (1, 6, 5)) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.conv, self.fc, self.head = nn.Conv2d(channels, 8, 3, padding=1), nn.Linear(8 * height * width, 12), nn.Linear(12, outputs)
        self.act1, self.act2 = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.conv(x))
        return self.head(self.act2(self.fc(x.flatten(1))))


@pytest.mark.parametrize("inject", [False, True])
def test_activations_that_are_registered_after_all_layers(inject: bool) -> None:
    """The penalty and α of a feature map are those of its channels, found in the first forward pass."""
    model, x, y = made(Late), rand(4, 1, 6, 5), torch.tensor([0, 1, 2, 0])
    keeper = selfless.attach(model, MAS(), SLNID(1.0), layers=["act1", "act2"], inject=inject)
    maps = F.relu(model.conv(x))
    flat = maps.movedim(1, -1).flatten(0, -2)
    wanted = functional.slni(flat) + functional.slni(F.relu(model.fc(maps.flatten(1))))  # α is 0 in the first task
    loss = F.cross_entropy(model(x), y)
    if not inject:
        assert_close(keeper.penalty(), wanted)
    loss.backward()
    keeper.consolidate([(x, y)])
    assert {name: len(alpha) for name, alpha in keeper.alpha.items()} == {"act1": 8, "act2": 12}


@pytest.mark.parametrize("sparsify", ["slnid:1e-3", "orth-reg:1e-3"])
def test_runs_of_a_network_whose_activations_come_last(sparsify: str, tasks_npz: str) -> None:
    """The weights before `act1` are those of the convolution; before, the head was taken, because it is registered right before it."""
    run = selfless.Run(stream=tasks_npz, model=Late, preserve="mas:1", sparsify=sparsify, epochs=1, tasks=1, batch=50)
    learner = Learner([run])
    learner.learn()
    assert learner.fleet.stack.weight_before("act1") == "conv.weight"
    assert learner.fleet.stack.weight_before("act2") == "fc.weight"
