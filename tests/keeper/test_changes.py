"""Changes of the model that leave old tasks without protection are said: thawed parameters, replaced layers, copies."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import selfless
from selfless import MAS, LwF, NoPreserver, PackNet
from tests.keeper.nets import Net, batches, seeded, sequential, train


def learn(model: nn.Module, keeper: Any, seed: int = 0) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    train(model, keeper, torch.optim.SGD(trained, lr=0.05), batches(seed), epochs=2)
    keeper.consolidate(batches(seed))


@pytest.mark.parametrize("preserve", [MAS(1.0), PackNet(0.5), LwF(1.0) + MAS(1.0)], ids=str)
def test_parameters_that_were_frozen_when_a_task_ended_are_named_once_they_train(preserve: Any) -> None:
    model = seeded(Net)
    keeper = selfless.attach(model, preserve)
    model.fc1.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*begin_epoch")
        warnings.filterwarnings("error", ".*did not train")
        learn(model, keeper)
        model.fc1.requires_grad_(True)
    model(batches()[0][0])
    with pytest.warns(UserWarning, match=r"fc1\.weight, fc1\.bias did not train when task 1 ended"):
        keeper.penalty(batches()[0])
    with warnings.catch_warnings():  # said once
        warnings.simplefilter("error")
        model(batches()[0][0])
        keeper.penalty(batches()[0])


def test_what_no_old_task_needs_may_be_thawed() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.ModuleList(nn.Linear(8, 3) for _ in range(2))
            self.now = 0

        def forward(self, x: torch.Tensor) -> Any:
            return self.heads[self.now](self.body(x))

    for heads in ([], ["heads.0", "heads.1"]):
        model = seeded(Heads)
        keeper = selfless.attach(model, MAS(1.0), heads=heads)
        model.heads[1].requires_grad_(False)  # the head of a later task
        learn(model, keeper)
        model.now = 1
        model.heads[0].requires_grad_(False)
        model.heads[1].requires_grad_(True)
        learn(model, keeper, 1)
    plain = selfless.attach(seeded(Net), NoPreserver())
    plain.model.fc1.requires_grad_(False)
    learn(plain.model, plain)
    plain.model.fc1.requires_grad_(True)
    learn(plain.model, plain, 1)


def test_a_layer_that_was_replaced_is_named() -> None:
    model = seeded(Net)
    keeper = selfless.attach(model, MAS(1.0))
    learn(model, keeper)
    model.head = nn.Linear(12, 3)
    with pytest.warns(UserWarning, match=r"'head\.weight' is another parameter than when task 1 ended"):
        learn(model, keeper, 1)


def test_the_same_weights_in_other_tensors_are_no_replacement() -> None:
    model = seeded(Net)
    keeper = selfless.attach(model, MAS(1.0))
    learn(model, keeper)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    learn(model, keeper, 1)
    saved = keeper.state_dict()
    other = seeded(Net, 5)
    again = selfless.attach(other, MAS(1.0))
    other.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    again.load_state_dict(saved)
    learn(other, again, 2)


@pytest.mark.parametrize("tasks", [0, 1])
def test_a_copy_that_is_trained_instead_is_noticed(tasks: int) -> None:
    model = seeded(Net)
    keeper = selfless.attach(model, MAS(1.0))
    for task in range(tasks):
        learn(model, keeper, task)
    trained = copy.deepcopy(model)
    train(trained, keeper, torch.optim.SGD(trained.parameters(), lr=0.05), batches(1), epochs=2)
    with pytest.warns(UserWarning, match="no weight of the attached model has changed"):
        keeper.consolidate(batches(1))
    again = selfless.attach(trained, MAS(1.0))
    again.load_state_dict(keeper.state_dict())
    learn(trained, again, 2)


def test_a_pretrained_model_needs_no_training() -> None:
    model = seeded(Net)
    keeper = selfless.attach(model, MAS(1.0))
    keeper.consolidate(batches())
    keeper.consolidate(batches(1))
    assert keeper.tasks == 2


def test_the_same_data_in_another_loader_are_the_same_task() -> None:
    model = seeded(Net)
    keeper = selfless.attach(model, MAS(1.0))
    learn(model, keeper)
    with pytest.warns(UserWarning, match="called twice with the same data and no step between"):
        keeper.consolidate([(x.clone(), y) for x, y in reversed(batches())])


@pytest.mark.parametrize("kind", ["data", "master", "new head"])
def test_steps_that_no_version_counts_are_steps(kind: str) -> None:
    model = seeded(Net)
    keeper = selfless.attach(model, MAS(1.0))
    learn(model, keeper)
    if kind == "new head":
        model.other = nn.Linear(2, 2)
    masters = [p.detach().clone() for p in model.parameters()]
    for x, y in batches(1) * 2:
        model.zero_grad()
        (nn.functional.cross_entropy(model(x), y) + keeper.penalty()).backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            if p.grad is not None and kind == "data":
                p.data -= 0.1 * p.grad
            elif p.grad is not None and kind == "master":
                p.data.copy_(master.sub_(p.grad, alpha=0.1))
    keeper.consolidate(batches(1))


def test_a_base_that_was_made_for_inference() -> None:
    with torch.inference_mode():
        base = nn.Linear(6, 6)
    base.requires_grad_(False)
    model = nn.Sequential(base, nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    learn(model, selfless.attach(model, MAS(1.0)))


def test_a_loop_without_penalty_is_told_too() -> None:
    model = seeded(Net)
    model.fc1.requires_grad_(False)
    keeper = selfless.attach(model, MAS(1.0))
    keeper.consolidate(batches())
    model.fc1.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    keeper.anchor_with(optimizer)
    x, y = batches(1)[0]
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.warns(UserWarning, match="did not train when task 1 ended"):
        optimizer.step()


def test_replayed_samples_protect_what_was_frozen() -> None:
    model = seeded(Net)
    keeper = selfless.attach(model, "replay:1")
    model.fc1.requires_grad_(False)
    for seed in range(2):
        train_with_batches(model, keeper, seed)
        model.fc1.requires_grad_(True)


def train_with_batches(model: nn.Module, keeper: Any, seed: int) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for x, y in batches(seed):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x), y) + keeper.penalty((x, y))).backward()
        optimizer.step()
    keeper.consolidate(batches(seed))


def test_parameters_of_later_tasks_are_not_needed_by_earlier_ones() -> None:
    class Prompts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p0, self.p1 = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6), requires_grad=False)
            self.body, self.heads, self.now = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 3) for _ in range(2)), 0

        def forward(self, x: torch.Tensor) -> Any:
            return self.heads[self.now](torch.relu(self.body(x + (self.p1 if self.now else self.p0))))

    model = seeded(Prompts)
    keeper = selfless.attach(model, MAS(1.0), heads=["heads.0", "heads.1"])
    learn(model, keeper)
    model.now = 1
    model.p1.requires_grad_(True)
    model.heads[1] = nn.Linear(8, 3)  # no task has used the old one
    learn(model, keeper, 1)


HELD = {"anchor", "omega", "earned", "frozen", "owner", "merged", "mass"}  # groups that protect old tasks
METHODS = ["mas:1", "ewc:1", "ewc-online:1", "si:1", "rwalk:1", "lwf:1", "imm:0.1", "packnet:0.5", "hat:0.75", "ags-cl:1"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_layer_that_is_frozen_in_a_later_task_stays_protected(method: str) -> None:
    """Old tasks were measured while it trained. What holds it must still be there when it trains again."""
    model = seeded(sequential)
    keeper, held = selfless.attach(model, method), list[dict[str, dict[str, torch.Tensor]]]()
    for task in range(2):
        model[2].requires_grad_(task == 0)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        keeper.anchor_with(optimizer)
        keeper.begin_epoch(0, 1, batches=4)
        for x, y in batches(task):
            optimizer.zero_grad()
            (nn.functional.cross_entropy(model(x), y) + keeper.penalty((x, y))).backward()
            optimizer.step()
        keeper.consolidate(batches(task))
        state = {group: tensors for group, tensors in keeper.states[0].items() if group in HELD}
        held.append({g: {n: t.clone() for n, t in tensors.items() if n.startswith("2.")} for g, tensors in state.items()})
    before, after = held
    assert any(before.values())
    for group, tensors in before.items():
        assert tensors.keys() <= after[group].keys(), group
        for name, value in tensors.items() if group in ("anchor", "frozen", "owner") else ():
            torch.testing.assert_close(after[group][name], value)


@pytest.mark.parametrize("method", ["mas:1", "imm:0.01", "imm:0.01,merge=mode", "gpm:0.9", "sgp:0.9", "lwf:1", "packnet:0.5"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_precision_of_a_model_may_change_between_tasks(method: str, dtype: torch.dtype) -> None:
    model = seeded(sequential)
    keeper = selfless.attach(model, method)
    for task, now in enumerate((torch.float32, dtype, torch.float32)):
        model.to(now)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        keeper.begin_epoch(0, 1, batches=4)
        for x, y in batches(task):
            optimizer.zero_grad()
            (nn.functional.cross_entropy(model(x.to(now)), y) + keeper.penalty((x.to(now), y))).backward()
            optimizer.step()
        keeper.consolidate([(x.to(now), y) for x, y in batches(task)])
    assert all(bool(torch.isfinite(p).all()) and p.dtype == torch.float32 for p in model.parameters())
