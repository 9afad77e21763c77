"""Mistakes in a loop that cost protection without any error are said: lost penalties, weights restored too late, tasks without an end."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selfless
from selfless import MAS, SI, LwF
from tests.keeper.nets import batches, seeded, sequential


def two_tasks(preserve: Any, epochs: int = 2, add: bool = True) -> tuple[nn.Module, selfless.Keeper, torch.optim.Optimizer]:
    """A model that has learned one task in a loop that begins its epochs."""
    model = seeded(sequential)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = selfless.attach(model, preserve).anchor_with(optimizer) if preserve.name == "mas" else selfless.attach(model, preserve)
    learn(model, keeper, optimizer, 0, epochs, add)
    return model, keeper, optimizer


def learn(
    model: nn.Module, keeper: selfless.Keeper, optimizer: torch.optim.Optimizer, task: int, epochs: int = 2, add: bool = True
) -> None:
    for epoch in range(epochs):
        keeper.begin_epoch(epoch, epochs)
        for x, y in batches(task):
            optimizer.zero_grad()
            loss, penalty = F.cross_entropy(model(x), y), keeper.penalty((x, y))
            (loss + penalty if add else loss).backward()
            optimizer.step()


@pytest.mark.parametrize("preserve", [MAS(1.0), LwF(1.0)], ids=str)
def test_weights_that_are_restored_after_the_end_of_a_task_are_named(preserve: Any) -> None:
    model, keeper, optimizer = two_tasks(preserve)
    best = copy.deepcopy(model.state_dict())
    keeper.notices.silence_epochs()
    learn(model, keeper, optimizer, 0, 1)  # overtrained
    keeper.consolidate(batches(0))
    model.load_state_dict(best)
    with pytest.warns(UserWarning, match=r"'0\.weight' has changed since task 1 ended.*do so before consolidate"):
        learn(model, keeper, optimizer, 1, 1)


def test_weights_that_are_restored_before_it_and_evaluations_are_no_change() -> None:
    model, keeper, optimizer = two_tasks(MAS(1.0))
    best = copy.deepcopy(model.state_dict())
    keeper.notices.silence_epochs()
    learn(model, keeper, optimizer, 0, 1)  # overtrained
    model.load_state_dict(best)
    keeper.consolidate(batches(0))
    with torch.no_grad():
        model[0].weight.add_(1.0)  # weights for an evaluation
        model.load_state_dict(best)
    learn(model, keeper, optimizer, 1, 1)


@pytest.mark.parametrize("preserve", [LwF(1.0), SI(1.0), MAS(1.0) + LwF(1.0)], ids=str)
def test_a_penalty_that_is_not_added_to_the_loss_is_noticed(preserve: Any) -> None:
    model, keeper, optimizer = two_tasks(preserve)
    keeper.consolidate(batches(0))
    learn(model, keeper, optimizer, 1, 1, add=False)
    with pytest.warns(UserWarning, match=r"penalty\(\) was called \d+ times in this task, but no backward pass reached its value"):
        keeper.consolidate(batches(1))


def test_a_penalty_of_nothing_need_not_be_reached() -> None:
    model = seeded(sequential)
    keeper, parameters = selfless.attach(model, MAS(1.0)), list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for x, y in batches(0):
        loss = F.cross_entropy(model(x), y) + keeper.penalty()  # 0 in the first task
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = gradient
        optimizer.step()
    keeper.consolidate(batches(0))


def test_heads_of_other_tasks_and_a_second_try_are_no_mistakes() -> None:
    body, heads = seeded(lambda: nn.Linear(6, 8)), nn.ModuleList([nn.Linear(8, 3) for _ in range(3)])
    model = nn.ModuleDict({"body": body, "heads": heads})
    keeper = selfless.attach(model, MAS(1.0))
    for t in range(3):
        start = copy.deepcopy(model.state_dict())
        for _ in range(2):  # each task is tried twice, from its start
            model.load_state_dict(start)
            optimizer = torch.optim.SGD([*body.parameters(), *heads[t].parameters()], lr=0.05)
            for epoch in range(2):
                keeper.begin_epoch(epoch, 2)
                for x, y in batches(t):
                    optimizer.zero_grad()
                    (F.cross_entropy(heads[t](body(x)), y) + keeper.penalty()).backward()
                    optimizer.step()
        keeper.consolidate(batches(t), forward=lambda m, b, t=t: m["heads"][t](m["body"](b[0])))


@pytest.mark.parametrize("preserve", ["lwf:1+packnet:0.5", "mas:1+packnet:0.5"])
def test_a_layer_that_is_replaced_beside_a_method_that_writes_weights_is_named(preserve: str) -> None:
    model = seeded(sequential)
    keeper = selfless.attach(model, preserve)
    learn(model, keeper, torch.optim.SGD(model.parameters(), lr=0.05), 0)
    keeper.consolidate(batches(0))
    model[2] = nn.Linear(16, 12)
    with pytest.warns(UserWarning, match=r"'2\.weight' is another parameter"):
        learn(model, keeper, torch.optim.SGD(model.parameters(), lr=0.05), 1)


def test_a_layer_that_no_optimizer_has_is_named() -> None:
    model, keeper, optimizer = two_tasks(MAS(1.0))
    keeper.consolidate(batches(0))
    assert isinstance(model, nn.Sequential)
    model.append(nn.ReLU())
    model.append(nn.Linear(3, 3))
    learn(model, keeper, optimizer, 1)
    with pytest.warns(UserWarning, match=r"6\.weight, 6\.bias got a gradient in this task, but no optimizer.*build a new optimizer"):
        keeper.consolidate(batches(1))


def test_a_number_is_not_replaced_by_a_strength_that_was_measured() -> None:
    model, keeper, _ = two_tasks(MAS("auto"))
    keeper.consolidate(batches(0))
    other = selfless.attach(copy.deepcopy(model), MAS(0.1))
    other.load_state_dict(keeper.state_dict())
    assert other.strengths == {"mas": 0.1}
    assert keeper.strengths["mas"] != 0.1


def test_a_first_epoch_that_comes_again_is_noticed_once() -> None:
    model, keeper, optimizer = two_tasks(MAS(1.0))
    with pytest.warns(UserWarning, match=r"epoch 0 begins again.*call keeper\.consolidate\(\) first"):
        learn(model, keeper, optimizer, 1)
    learn(model, keeper, optimizer, 2)
