"""What a loop may leave out or do twice: a warning or an error says so, where the network would only be worse."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selfless
from selfless.testing.small import small_net, small_task


class Normed(nn.Module):
    """A convolution and its norm, with activations as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 36, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm(self.conv(x))).flatten(1)
        return torch.as_tensor(self.head(F.relu(self.fc(h))))


def step(model: nn.Module, keeper: Any, optimizer: torch.optim.Optimizer, batch: Any, inject: bool = False) -> None:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    optimizer.zero_grad()
    (loss if inject else loss + keeper.penalty(batch)).backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize("inject", [False, True])
def test_a_norm_that_is_frozen_by_eval_does_not_switch_its_layer_off(inject: bool) -> None:
    torch.manual_seed(0)
    model, batch = Normed(), (torch.randn(8, 1, 8, 8), torch.randint(0, 3, (8,)))
    keeper, optimizer = selfless.attach(model, None, "slnid:1e-2", layers="all", inject=inject), sgd(model)
    step(model, keeper, optimizer, batch, inject)
    model.norm.eval()
    step(model, keeper, optimizer, batch, inject)
    assert keeper.log()["inhibition/conv"] > 0


class Odd(nn.Module):
    """One module is never called, one returns a tuple."""

    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.relu(), x

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pair, self.last, self.never = nn.Linear(5, 8), self.Pair(), nn.Linear(8, 3), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.last(self.pair(self.first(x))[0]))


@pytest.mark.parametrize(("layer", "inject"), [("never", False), ("pair", False), ("pair", True)])
def test_layers_that_give_no_activations_are_an_error_in_the_first_step(layer: str, inject: bool) -> None:
    model = Odd()
    keeper, optimizer = selfless.attach(model, None, "slnid:1e-2", layers=[layer], inject=inject), sgd(model)
    message = {"never": r"the activations of no layer \(never\) were read", "pair": "layer 'pair' returns a tuple, not a tensor"}
    with pytest.raises((RuntimeError, TypeError), match=message[layer]):
        step(model, keeper, optimizer, small_task(0)[0], inject)


def test_injected_layers_that_give_no_activations_are_said_aloud_when_the_task_ends() -> None:
    """Not in a step: layers may be used in turns, or be frozen at first. Here the model is trained in eval mode."""
    model = small_net().eval()
    keeper, optimizer = selfless.attach(model, None, "slnid:1e-2", inject=True), sgd(model)
    step(model, keeper, optimizer, small_task(0)[0], inject=True)
    with pytest.warns(UserWarning, match="the activations of 0, 2 were never read, so the sparsifier"):
        keeper.consolidate(small_task(0))


def test_injecting_takes_branches_in_turns_and_a_frozen_body() -> None:
    model = nn.ModuleDict({name: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)) for name in ("a", "b")})
    keeper, optimizer = selfless.attach(model, None, "slnid:1e-2", layers=["a.1", "b.1"], inject=True), sgd(model)
    model["a"].requires_grad_(False)
    x, y = small_task(0)[0]
    for name in ("a", "b"):
        (F.cross_entropy(model[name](x), y) + 0 * sum(p.sum() for p in model["b"].parameters())).backward()
        optimizer.step()
    assert keeper.log()["inhibition/b.1"] > 0


def test_loading_names_what_the_model_does_not_have() -> None:
    model = Normed()
    keeper = selfless.attach(model, "mas:1")
    keeper.consolidate([(torch.randn(8, 1, 8, 8), torch.randint(0, 3, (8,)))])
    other = copy.deepcopy(model)
    other.stem = other.conv
    del other.conv
    with pytest.warns(UserWarning, match=r"the model has no conv\.bias, conv\.weight, .* the state has no stem\.bias, stem\.weight"):
        selfless.attach(other, "mas:1").load_state_dict(keeper.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        selfless.attach(copy.deepcopy(model), "mas:1").load_state_dict(keeper.state_dict())


@pytest.mark.parametrize("stop", [1, 3, 7])
def test_distillation_that_is_resumed_within_a_task_is_that_without_a_stop(stop: int) -> None:
    """The steps in which its curvature is measured are counted from the start of the task."""
    batches = small_task(1) * 4

    def run(stop: int | None) -> nn.Module:
        model = small_net()
        optimizer, keeper = sgd(model), selfless.attach(model, "lwf:3")
        keeper.anchor_with(optimizer)
        keeper.consolidate(small_task(0))
        for number, batch in enumerate(batches):
            if number == stop:
                saved = copy.deepcopy((model.state_dict(), keeper.state_dict(), optimizer.state_dict()))
                keeper.detach()
                model = small_net()
                model.load_state_dict(saved[0])
                optimizer, keeper = sgd(model), selfless.attach(model, "lwf:3")
                keeper.anchor_with(optimizer)
                keeper.load_state_dict(saved[1])
                optimizer.load_state_dict(saved[2])
            step(model, keeper, optimizer, batch)
        return model

    whole = run(None).state_dict()
    assert all(torch.equal(whole[name], p) for name, p in run(stop).state_dict().items())


def test_a_task_that_was_trained_before_its_state_was_loaded_is_no_task_without_steps() -> None:
    for method in ("si:0.1", "mas:0.1", "hat:0.75"):
        model = small_net()
        keeper, optimizer = selfless.attach(model, method), sgd(model)
        keeper.anchor_with(optimizer)
        for task in range(2):
            keeper.begin_epoch(0, 1, batches=3)
            for batch in small_task(task):
                step(model, keeper, optimizer, batch)
            if not task:
                keeper.consolidate(small_task(task))
        other = copy.deepcopy(model)
        again = selfless.attach(other, method)
        again.load_state_dict(keeper.state_dict())
        again.anchor_with(sgd(other))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again.consolidate(small_task(1))


def test_a_warm_up_that_a_task_does_not_have_is_not_missed() -> None:
    model, batches = small_net(), small_task(0)
    keeper, optimizer = selfless.attach(model, "ebll:1"), sgd(model)
    keeper.begin_epoch(0, 10)
    step(model, keeper, optimizer, batches[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keeper.consolidate(batches)


def test_evaluating_a_method_that_changes_nothing_forbids_nothing() -> None:
    model, batches = small_net(), small_task(0)
    keeper, optimizer = selfless.attach(model, "mas:1"), sgd(model)
    keeper.consolidate(batches)
    with keeper.evaluating(0):
        step(model, keeper, optimizer, batches[0])
        keeper.consolidate(small_task(1))


def test_a_submodule_in_eval_mode_does_not_count() -> None:
    """A validation pass of the inner network of a wrapper that stays in training mode."""
    model = nn.Sequential(small_net())
    keeper, (x, _) = selfless.attach(model, None, "slnid:1e-2"), small_task(0)[0]
    model(x)
    alone = keeper.penalty()
    model(x)
    model[0].eval()
    model[0](10 * x)
    model[0].train()
    assert keeper.penalty().item() == pytest.approx(alone.item(), rel=1e-4)


@pytest.mark.parametrize("inject", [False, True])
@pytest.mark.parametrize("call", ["penalty", "consolidate", "begin_epoch", "step"])
def test_training_while_an_old_task_is_evaluated_is_an_error(call: str, inject: bool) -> None:
    model = small_net()
    if call == "penalty" and inject:
        pytest.skip("with inject=True there is no penalty()")
    keeper, optimizer = selfless.attach(model, "packnet:0.5", "slnid:1e-2", inject=inject), sgd(model)
    batch = small_task(0)[0]
    keeper.begin_epoch(0, 1)
    step(model, keeper, optimizer, batch, inject)
    keeper.consolidate([batch])
    calls: dict[str, Any] = {
        "penalty": lambda: (model(batch[0]), keeper.penalty()),
        "consolidate": lambda: keeper.consolidate(small_task(1)),
        "begin_epoch": lambda: keeper.begin_epoch(0, 1),
        "step": optimizer.step,
    }
    with keeper.evaluating(0), pytest.raises(RuntimeError, match=r"inside keeper\.evaluating\(\): the model has the weights of an old"):
        calls[call]()
    with keeper.evaluating(0), torch.no_grad():
        model(batch[0])
    calls[call]()


@pytest.mark.parametrize("method", ["si:1", "rwalk:1", "hat:0.75"])
def test_a_method_that_learns_in_steps_says_that_there_was_none(method: str) -> None:
    keeper = selfless.attach(small_net(), method)
    with pytest.warns(UserWarning, match="learns in the steps of an optimizer what a task needs"):
        keeper.consolidate(small_task(0))


def test_ending_a_task_twice_is_said_aloud() -> None:
    """But not if each call has its own data: a trained model that knows several tasks."""
    keeper, batches = selfless.attach(small_net(), "mas:1"), small_task(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keeper.consolidate(batches)
        keeper.consolidate(small_task(1))
        keeper.consolidate(batches)
    with pytest.warns(UserWarning, match="called twice with the same data"):
        keeper.consolidate(batches)


def test_two_heads_of_a_trained_model_are_two_tasks() -> None:
    keeper, batches = selfless.attach(small_net(), "mas:1"), small_task(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for head in (0, 1):
            keeper.consolidate(batches, lambda model, batch, head=head: model(batch[0])[:, head : head + 1])


def test_steps_by_hand_do_not_pass_for_anchored_ones() -> None:
    model, batches = small_net(), small_task(0)
    keeper = selfless.attach(model, "mas:1")
    keeper.anchor_with(sgd(model))
    keeper.consolidate(batches)
    for x, y in small_task(1):
        (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.05 * torch.as_tensor(p.grad))
    with pytest.warns(UserWarning, match="no step of a torch.optim optimizer was seen"):
        keeper.consolidate(small_task(1))


def test_a_task_that_stops_before_its_next_phase_is_said_aloud() -> None:
    model, batches = small_net(), small_task(0)
    keeper, optimizer = selfless.attach(model, "packnet:0.5"), sgd(model)
    for epochs, told in ((40, True), (3, False)):
        for epoch in range(3):
            keeper.begin_epoch(epoch, epochs)
            step(model, keeper, optimizer, batches[epoch])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            keeper.consolidate(batches)
        assert (
            [w for w in said if "ended after epoch 3 of 40, before PackNet began its next phase" in str(w.message)] != []
            if told
            else not said
        )


def test_gates_that_are_not_annealed_to_the_end_are_said_aloud() -> None:
    """Gradients accumulated over four batches: an epoch has fewer steps than batches."""
    model, batches = small_net(), small_task(0)
    keeper, optimizer = selfless.attach(model, "hat:0.75"), sgd(model)
    keeper.notices.silence_epochs()
    for told in (8, 3):
        keeper.begin_epoch(0, 2, batches=told)
        for batch in batches:
            step(model, keeper, optimizer, batch)
        if told == 8:
            with pytest.warns(UserWarning, match="had 3 optimizer steps, but begin_epoch was told batches=8"):
                keeper.begin_epoch(1, 2, batches=3)
        else:
            keeper.begin_epoch(1, 2, batches=3)
