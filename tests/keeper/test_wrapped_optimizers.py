"""Optimizers that a keeper must see through: one that wraps another, calls that of its class, fails, or is Adadelta."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import selfless
from selfless import MAS, PackNet
from selfless.keeper.anchor import step_of, step_sizes
from tests.keeper.strangers import data, network, train


class Wrapper(torch.optim.Optimizer):
    """An optimizer that lets another one take the step, as SAM does; `after` changes parameters once more, as Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer, after: Callable[[Tensor], object] = lambda p: None) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.after = inner, inner.param_groups, after

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for group in self.param_groups:
            for p in group["params"]:
                self.after(p)


def drift_left(wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> Tensor:
    """How much of a drift from θ* one step with the implicit anchor leaves."""
    model, batches = network(), data()
    keeper = selfless.attach(model, MAS(1.0))
    keeper.consolidate(batches)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    keeper.anchor_with(inner)
    with torch.no_grad():
        model[0].weight.add_(0.01)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    wrap(inner).step()
    return (model[0].weight - keeper.state["anchor"]["0.weight"]).detach()


def test_the_anchor_pulls_once_if_one_optimizer_wraps_another() -> None:
    once = drift_left(lambda inner: inner)
    assert 0 < float(once.abs().max()) < 0.01 + 1e-7
    assert torch.equal(drift_left(Wrapper), once)
    assert torch.equal(drift_left(lambda inner: Wrapper(Wrapper(inner))), once)


def test_the_anchor_pulls_once_if_a_step_calls_that_of_its_class() -> None:
    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)  # from now on the step of SGD has the hooks too
    assert torch.equal(drift_left(lambda inner: Clipped(inner.param_groups, 0.1)), drift_left(lambda inner: inner))


def test_parameters_that_the_outer_optimizer_moves_itself_are_anchored() -> None:
    class Both(Wrapper):
        """Moves all parameters, and lets another optimizer move the biases."""

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner)
            self.inner = torch.optim.SGD([p for p in inner.param_groups[0]["params"] if p.dim() < 2], 0.1)

    assert torch.equal(drift_left(Both), drift_left(lambda inner: inner))


def test_an_optimizer_of_other_parameters_inside_a_step_changes_nothing() -> None:
    other = nn.Parameter(torch.zeros(1))
    other.grad = torch.zeros(1)

    def step_other(_: Tensor) -> None:
        torch.optim.SGD([other], 0.1).step()

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            step_other(other)
            return super().step(closure)

    assert torch.equal(drift_left(lambda inner: Outer(inner.param_groups, 0.1)), drift_left(lambda inner: inner))


@pytest.mark.parametrize("wrap", [lambda inner: inner, Wrapper], ids=["plain", "wrapped"])
def test_a_step_that_failed_does_not_hide_the_next_ones(wrap: Any) -> None:
    def fail() -> Any:
        raise RuntimeError("out of memory")

    def after_a_failure(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        p = nn.Parameter(torch.zeros(1))
        for failing in (inner, Wrapper(torch.optim.SGD([p], 0.1))):
            with pytest.raises(RuntimeError, match="out of memory"):
                failing.step(fail) if failing is inner else Wrapper(torch.optim.SGD([p], 0.1), lambda _: fail()).step()
        return wrap(inner)  # type: ignore[no-any-return]

    assert torch.equal(drift_left(after_a_failure), drift_left(lambda inner: inner))


def test_steps_of_another_thread_are_not_inside_of_this_one() -> None:
    """A step that begins before a wrapped one, in another thread, and ends inside of it."""
    began, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        assert go_on.wait(30)

    other = nn.Parameter(torch.zeros(1))
    thread = threading.Thread(target=lambda: torch.optim.SGD([other], 0.1).step(wait))

    def beside(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        def let_it_end(_: Tensor) -> None:
            go_on.set()
            thread.join(30)

        thread.start()
        assert began.wait(30)
        return Wrapper(inner, let_it_end)

    left = drift_left(beside)
    assert not thread.is_alive()
    assert torch.equal(left, drift_left(lambda inner: inner))


def test_a_keeper_of_another_model_is_left_alone_by_a_wrapped_optimizer() -> None:
    model, batches = network(), data()
    keeper = selfless.attach(model, PackNet(0.5))
    keeper.begin_epoch(0, 1)
    train(model, keeper, batches)
    keeper.consolidate(batches)
    model.requires_grad_(False)
    p = nn.Parameter(torch.zeros(1))
    p.grad = torch.zeros(1)
    Wrapper(torch.optim.SGD([p], 0.1)).step()


def test_frozen_weights_stay_if_a_wrapper_moves_them_after_the_step() -> None:
    model, batches = network(), data()
    keeper = selfless.attach(model, PackNet(0.5))
    keeper.begin_epoch(0, 1)
    train(model, keeper, batches)
    keeper.consolidate(batches)
    held = keeper.state["owner"]["0.weight"] > 0
    before = model[0].weight[held].clone()
    keeper.begin_epoch(0, 1)
    train(model, keeper, batches, Wrapper(torch.optim.SGD(model.parameters(), 0.1), lambda p: p.add_(0.1)))
    assert torch.equal(model[0].weight[held], before)


@pytest.mark.parametrize("make", [torch.optim.Adadelta, torch.optim.Adam, torch.optim.RMSprop, torch.optim.SGD])
def test_the_step_size_of_a_piece_is_that_of_the_whole(make: Any) -> None:
    weight = nn.Parameter(torch.zeros(6, 4))
    optimizer = make([weight], lr=0.1)
    for seed in range(3):
        torch.manual_seed(seed)
        weight.grad = torch.randn(6, 4) * torch.arange(1.0, 7.0).unsqueeze(1)
        optimizer.step()
    group, state = optimizer.param_groups[0], optimizer.state[weight]
    whole = torch.as_tensor(step_of(group, state, weight)).expand(6, 4)
    assert make is torch.optim.SGD or len(whole.unique()) > 20, "entries have steps of their own"
    rows, flat = torch.tensor([4, 1]), slice(5, 17)
    torch.testing.assert_close(torch.as_tensor(step_of(group, state, weight, rows)).expand(2, 4), whole[rows])
    torch.testing.assert_close(torch.as_tensor(step_of(group, state, weight, flat)).expand(12), whole.flatten()[flat])


def test_the_step_size_of_adadelta_is_that_of_its_steps() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0, rho=0.9)
    for _ in range(20):
        model.weight.grad = torch.ones_like(model.weight)
        model.bias.grad = torch.ones_like(model.bias)
        before = model.weight.detach().clone()
        expected = step_sizes(optimizer, {model.weight: "weight"})["weight"] if optimizer.state else None
        optimizer.step()
        if expected is not None:
            torch.testing.assert_close(torch.as_tensor(expected).expand_as(before), before - model.weight.detach(), rtol=0.5, atol=0)
    torch.testing.assert_close(torch.as_tensor(expected).expand_as(before), before - model.weight.detach(), rtol=0.1, atol=0)
