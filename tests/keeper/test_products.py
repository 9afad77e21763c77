"""Loops and models of products: several rates, steps by hand and inside the backward pass, experts, norms of weights, resized layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

import selfless
from selfless import AGSCL, EWC, GPM, HAT, MAS, SGP, SLNID, LwF, PackNet, RWalk
from selfless.keeper.anchor import step_sizes
from selfless.keeper.damping import Optimizers
from selfless.preserve import Preserver, Replay
from tests.keeper.strangers import data, network, no_warning


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 12), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(12, 3) for _ in range(2))

    def forward(self, x: Tensor, task: int = 1) -> Tensor:
        return self.heads[task](self.body(x))


def made(build: Callable[[], Any] = TwoHeads) -> Any:
    torch.manual_seed(1)
    return build()


def of_task(task: int) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: model(batch[0], task)


def sgd(model: TwoHeads, order: int, slow: float, fast: float) -> list[torch.optim.Optimizer]:
    """A slow body and a fast head: as two groups, in the other order, or as two optimizers."""
    groups = [{"params": model.body.parameters(), "lr": slow}, {"params": model.heads.parameters(), "lr": fast}]
    return [torch.optim.SGD([g], 0.0, 0.9) for g in groups] if order == 2 else [torch.optim.SGD(groups[:: 1 - 2 * order], 0.0, 0.9)]


@pytest.mark.parametrize("order", [0, 1, 2])
def test_distillation_is_damped_by_the_rates_of_all_groups_and_optimizers(order: int) -> None:
    model = made()
    keeper = selfless.attach(model, LwF(1e3), heads=["heads.0", "heads.1"])
    optimizers, largest = sgd(model, order, 1e-4, 0.3), 0.0
    for optimizer in optimizers:
        keeper.anchor_with(optimizer)
    for task in range(2):
        for _ in range(20):
            for x, y in data(task):
                loss = F.cross_entropy(model(x, task), y) + keeper.penalty((x, y))
                largest = max(largest, keeper.log().get("distillation", 0.0))
                model.zero_grad()
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
        keeper.consolidate(data(task), forward=of_task(task))
    assert 0 < largest < 3  # with the rate of the body alone it grows to hundreds


@pytest.mark.parametrize("rates", [(0.0, 0.3), (0.3, 0.0)])
def test_gates_learn_while_a_part_stands_still(rates: tuple[float, float]) -> None:
    """As two groups, or as two optimizers: the first step of a task cannot know of the second optimizer, each later one does."""
    found = []
    for order in (0, 2):
        model = made()
        keeper = selfless.attach(model, HAT(1.0), layers=["body.0"])
        optimizers = sgd(model, order, *rates)
        keeper.begin_epoch(0, 1, batches=3)
        before = next(iter(keeper.state["embedding"].values())).clone()
        for x, y in data():
            loss = F.cross_entropy(model(x), y) + keeper.penalty()
            model.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        found.append(float((next(iter(keeper.state["embedding"].values())) - before).norm()))
    assert found[0] > 0
    assert found[1] > found[0] / 3


def test_the_optimizers_of_a_task() -> None:
    model = made()
    names = {p: n for n, p in model.named_parameters()}
    slow, fast = sgd(model, 2, 0.1, 0.4)
    known = Optimizers()
    for optimizer in (slow, fast, slow):
        known.note(optimizer, is_anchored=True)
    step, shares = known.nominal_steps(dict(model.named_parameters()))
    assert step == pytest.approx(4.0)  # lr/(1 − μ), the largest, wherever it is
    assert shares["body.0.weight"] == pytest.approx(0.25)
    assert shares["heads.1.bias"] == 1.0
    known.end_task()  # the last one, until an optimizer takes a step
    assert known.nominal_steps(dict(model.named_parameters()))[0] == pytest.approx(1.0)
    assert known.largest_rate(names) == pytest.approx(0.1)
    known.note(fast, is_anchored=True)  # the other one is of the task before
    step, shares = known.nominal_steps(dict(model.named_parameters()))
    assert step == pytest.approx(4.0)
    assert "body.0.weight" not in shares
    known.note(slow, is_anchored=False)
    assert known.nominal_steps(dict(model.named_parameters())) == (None, {})
    assert known.largest_rate(names) == pytest.approx(0.4)


def test_the_curvature_of_distillation_counts_each_parameter_by_its_rate() -> None:
    """κ is that of the steps which the optimizers take: parameters that stand still do not damp the others."""
    found = []
    for frozen in (False, True):
        model = made()
        keeper = selfless.attach(model, LwF(1.0), heads=["heads.0", "heads.1"])
        keeper.consolidate(data(0), forward=of_task(0))
        if frozen:
            for p in model.body.parameters():
                p.requires_grad_(False)
        groups = [{"params": model.body.parameters(), "lr": 0.1 if frozen else 0.0}, {"params": model.heads.parameters(), "lr": 0.1}]
        optimizer = torch.optim.SGD(groups, 0.1)
        keeper.anchor_with(optimizer)
        with torch.no_grad():
            model.heads[0].weight.mul_(3.0)
        x, y = data(1)[0]
        (F.cross_entropy(model(x), y) + keeper.penalty((x, y))).backward()
        found.append(float(keeper.state["curvature"]["largest"]))
    assert found[0] == pytest.approx(found[1])
    assert found[0] > 0


def by_hand(model: nn.Module, keeper: selfless.Keeper, task: int) -> None:
    for _ in range(2):
        for x, y in data(task):
            model.zero_grad()
            (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.05 * (0 if p.grad is None else p.grad)


@pytest.mark.parametrize("method", [HAT(1.0), GPM(0.9), SGP(0.9), AGSCL(10.0), MAS(1.0), PackNet(0.5)], ids=str)
@pytest.mark.filterwarnings("ignore:PackNet has phases")
def test_weights_that_are_updated_by_hand(method: Preserver) -> None:
    model = network()
    keeper = selfless.attach(model, method)
    for task in range(2):
        keeper.begin_epoch(0, 1, batches=6)
        by_hand(model, keeper, task)
        if isinstance(method, HAT) or (task and not isinstance(method, MAS | PackNet)):
            with pytest.warns(UserWarning, match=f"{type(method).__name__} protected nothing"):
                keeper.consolidate(data(task))
            return
        with no_warning():
            keeper.consolidate(data(task))


@pytest.mark.parametrize("method", [Replay(1.0, samples=8), MAS(1.0), GPM(0.9), PackNet(0.5), None], ids=str)
def test_a_task_that_cannot_end_changes_nothing(method: Preserver | None) -> None:
    model = network()
    keeper = selfless.attach(model, method, SLNID(1e-3))
    keeper.consolidate(data())
    model[0], model[2] = nn.Linear(5, 16), nn.Linear(16, 3)
    before = keeper.state_dict()
    with pytest.raises(ValueError, match="do not resize"):
        keeper.consolidate(data(1))
    assert (keeper.tasks, len(keeper.forwards)) == (1, 1)
    for key, value in keeper.state_dict().items():
        assert_close(value, before[key], rtol=0, atol=0)
    with pytest.raises(ValueError, match="do not resize"):
        keeper.begin_epoch(0, 1) if isinstance(method, PackNet) else keeper.consolidate(data(1))


class Own(torch.optim.Optimizer):
    def __init__(self, params: Any, **more: Any) -> None:
        super().__init__(params, {"lr": 0.02, "momentum": 0.95, "nesterov": True} | more)


def test_the_momentum_of_muon_is_an_average() -> None:
    p = nn.Parameter(torch.zeros(3))
    assert step_sizes(Own([p], ns_steps=5), {p: "p"}) == {"p": 0.02}
    assert step_sizes(Own([p]), {p: "p"}) == {"p": pytest.approx(0.4)}


def test_weights_of_no_optimizer_stay_as_they_are_needed() -> None:
    """Only the last layer has an optimizer in the second task; the loop scales the first one by hand."""
    model = network()
    keeper = selfless.attach(model, PackNet(0.5), layers=["0"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for task in range(2):
        for epoch in range(2):
            keeper.begin_epoch(epoch, 2)
            for x, y in data(task):
                optimizer.zero_grad()
                (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
                optimizer.step()
                if task:
                    with torch.no_grad():
                        model[0].weight.mul_(1.01)
        keeper.consolidate(data(task))
        optimizer = torch.optim.SGD(model[2].parameters(), 0.1)
    with keeper.evaluating(0):
        before = model(data()[0][0])
    keeper.begin_epoch(0, 2)
    (F.cross_entropy(model(data()[0][0]), data()[0][1]) + keeper.penalty()).backward()
    optimizer.step()
    with keeper.evaluating(0):
        assert_close(model(data()[0][0]), before)


class Experts(nn.Module):
    """Each sample goes to one of three experts; a batch may leave some out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 6), nn.ReLU())
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        h = self.first(x)
        out = h.new_zeros(len(x), 7)
        for k, expert in enumerate(self.experts):
            own = (chosen == k).nonzero()[:, 0]
            out = out.index_add(0, own, expert(h[own]))
        return self.head(out)


@pytest.mark.parametrize("inject", [False, True])
def test_a_penalty_where_no_sample_reaches_an_expert(inject: bool) -> None:
    gradients = []
    for layers in (["first.0", "experts.0.0", "experts.1.0", "experts.2.0"], ["first.0", "experts.1.0"]):
        model = made(Experts)
        keeper = selfless.attach(model, None, SLNID(1.0), layers=layers, inject=inject)
        for chosen in (torch.arange(8) % 3, torch.ones(8, dtype=torch.int64)):  # the first step prepares the next one
            model.zero_grad()
            loss = model(data()[0][0], chosen).square().sum()
            (loss if inject else loss + keeper.penalty()).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for some, others in zip(*gradients, strict=True):
        assert_close(some, others)


@pytest.mark.filterwarnings("ignore:.*sample by sample")
def test_the_exact_fisher_needs_neurons_of_every_sample() -> None:
    model = made(Experts)
    keeper = selfless.attach(model, EWC(1.0, fisher="exact"), SLNID(1e-3))
    batches = [((x, y), torch.arange(8) % 3) for x, y in data()]
    with pytest.raises(ValueError, match=r"layer 'experts\.0\.0' ran on 3 rows of a batch of 8 samples"):
        keeper.consolidate(batches, forward=lambda model, batch: model(batch[0][0], batch[1]))


@pytest.mark.filterwarnings("ignore:.*is deprecated in favor of")
def test_weights_with_norms_of_their_own() -> None:
    def normed(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(wrap(nn.Linear(5, 12)), nn.ReLU(), nn.Linear(12, 3))

    for wrap in (parametrizations.spectral_norm, nn.utils.spectral_norm):
        with pytest.raises(ValueError, match="changes with every batch of a new task"):
            selfless.attach(normed(wrap), PackNet(0.5))
    for wrap in (parametrizations.weight_norm, nn.utils.weight_norm):
        with pytest.raises(ValueError, match="weight_norm of '0' divides by their norm"):
            selfless.attach(normed(wrap), PackNet(0.5))
        selfless.attach(normed(wrap), MAS(1.0)).detach()
        frozen = normed(wrap)
        frozen[0].requires_grad_(False)
        selfless.attach(frozen, PackNet(0.5)).detach()


class Centred(nn.Module):
    """Keeps the mean of its inputs in a buffer, and the number of its batches in another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(5), persistent=False)
        self.register_buffer("bounds", torch.tensor([float("nan"), 1.0]))
        self.moves = True

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.cache = x[0].detach()
            if self.moves:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("moves", [True, False])
def test_a_buffer_that_follows_the_newest_task(moves: bool, count: int) -> None:
    centre = Centred()
    centre.moves = moves
    model = nn.Sequential(centre, *network())
    keeper = selfless.attach(model, MAS(1.0))
    optimizers = [torch.optim.SGD(list(model.parameters())[k::count], 0.1) for k in range(count)]

    def step() -> None:
        x, y = data()[0]
        (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
        for optimizer in optimizers:
            optimizer.step()

    step()
    keeper.consolidate(data())
    with no_warning():
        centre.bounds[1] = 3.0  # set for the new task
        step()
    if moves:
        with pytest.warns(UserWarning, match=r"the buffer '0\.mean' changes in the training steps of task 2"):
            step()
    with no_warning():
        step()


@pytest.mark.parametrize("method", [RWalk(1.0), MAS(1.0)], ids=str)
def test_sparse_embeddings(method: Preserver) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    keeper, optimizer = selfless.attach(model, method), torch.optim.SGD(model.parameters(), 0.1)
    keeper.anchor_with(optimizer)
    for _ in range(2):
        batch = torch.randint(6, (8, 2)), torch.randint(3, (8,))
        for _ in range(3):
            optimizer.zero_grad()
            (F.cross_entropy(model(batch[0]), batch[1]) + keeper.penalty()).backward()
            optimizer.step()
        keeper.consolidate([batch])
    assert all(bool(torch.isfinite(t).all()) for t in keeper.state_dict().values())


def step_at_once(optimizer: torch.optim.Optimizer, _: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("method", [PackNet(0.5), HAT(1.0)], ids=str)
def test_steps_inside_the_backward_pass(method: Preserver) -> None:
    found = []
    for inside in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
        keeper = selfless.attach(model, method, layers=["0", "2"])
        own = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
        if inside:
            for p, optimizer in own.items():
                p.register_post_accumulate_grad_hook(partial(step_at_once, optimizer))
        for task in range(2):
            for epoch in range(2):
                torch.manual_seed(task)
                keeper.begin_epoch(epoch, 2, batches=3)
                for x, y in data(task):
                    (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
                    for optimizer in own.values() if not inside else ():
                        optimizer.step()
                        optimizer.zero_grad()
            keeper.consolidate(data(task))
        found.append([p.detach().clone() for p in model.parameters()])
    if isinstance(method, PackNet):  # the gates of HAT learn at the first step after their gradient is there
        for one, other in zip(*found, strict=True):
            assert_close(one, other)


def test_a_forward_that_does_not_fit_the_call_of_the_model() -> None:
    model = made()
    keeper = selfless.attach(model, LwF(1.0), heads=["heads.0", "heads.1"], inject=True)
    batches = [(x, y, torch.zeros(8)) for x, y in data()]
    keeper.consolidate(batches, forward=lambda model, batch: model(batch[0], len(batch[2].shape) - 1))
    with pytest.raises(IndexError) as error:
        model(batches[0][0]).sum().backward()
    assert any("arguments of the model's own call" in note for note in error.value.__notes__)
