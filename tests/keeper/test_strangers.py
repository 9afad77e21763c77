"""What a stranger's loop does that no example does: other layouts of outputs, wrapped optimizers, renamed layers, a loop variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import selfless
from selfless import EBLL, EWC, HAT, MAS, SI, LwF, PackNet
from tests.keeper.strangers import data, network, no_warning, train


# ------------------------------------------------------------------------------------------------------------ layouts of outputs
class Pixels(nn.Module):
    """The class of each pixel; classes on axis 1, as F.cross_entropy takes them, or on the last one."""

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net, self.last = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Conv2d(8, 3, 1)), last

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).movedim(1, -1) if self.last else self.net(x)


@pytest.mark.parametrize("preserve", [LwF(2.0), LwF(2.0, damped=False)], ids=str)
def test_distillation_finds_the_classes_of_pixels(preserve: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 4, 2, 5), torch.randint(3, (6, 2, 5))
    found = []
    for last in (False, True):
        model = Pixels(last)
        keeper = selfless.attach(model, preserve)
        keeper.consolidate([(x, y)])
        with torch.no_grad():
            model.net[2].bias.add_(torch.tensor([0.0, 1.0, 2.0]))
        found.append(keeper.penalty((x, y)).detach())
    assert found[0] > 0.1
    torch.testing.assert_close(found[0], found[1])


def test_distillation_finds_the_classes_of_sequences() -> None:
    """Outputs (M, C, T) with labels (M, T) have their classes on axis 1."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 4, 5), torch.randint(3, (6, 5))
    model = nn.Conv1d(4, 3, 1)
    keeper = selfless.attach(model, LwF(1.0))
    keeper.consolidate([(x, y)])
    with torch.no_grad():
        assert model.bias is not None
        model.bias.add_(torch.tensor([0.0, 1.0, 2.0]))
    assert keeper.penalty((x, y)) > 0.05


@pytest.mark.parametrize("labels", [(6, 5), (6, 4), (6, 1), (6,), (6, 5, 3)], ids=str)
@pytest.mark.parametrize("method", [LwF(1.0), EWC(1.0, fisher="sampled")], ids=str)
def test_classes_stay_on_the_last_axis_whatever_else_a_batch_has(method: Any, labels: tuple[int, ...]) -> None:
    """Words, masks, lengths, soft labels: only class numbers of the shape of the other axes say that classes are on axis 1."""
    torch.manual_seed(0)
    x = torch.randn(6, 5, 4)
    y = torch.randn(labels).softmax(-1) if len(labels) == 3 else torch.randint(3, labels)
    model = nn.Linear(4, 3)
    keeper = selfless.attach(model, method)
    with no_warning():
        keeper.consolidate([(x, y)])
        with torch.no_grad():
            model.bias.add_(torch.tensor([0.0, 1.0, 2.0]))
        assert keeper.penalty((x, y)) > 0.01


def test_outputs_without_labels_have_their_classes_on_the_last_axis_and_this_is_said() -> None:
    model = Pixels()
    keeper = selfless.attach(model, LwF(1.0))
    x = torch.randn(6, 4, 2, 5)
    keeper.consolidate([(x, torch.randint(3, (6, 2, 5)))])
    with pytest.warns(UserWarning, match=r"takes the last axis of the output \(6, 3, 2, 5\) as the classes"):
        keeper.penalty((x,))


@pytest.mark.parametrize("method", [LwF(1.0), EBLL(1.0)], ids=str)
def test_labels_that_are_no_classes_are_said(method: Any) -> None:
    model = network()
    keeper = selfless.attach(model, method)
    x, y = data()[0]
    keeper.consolidate([(x, y)])
    for wrong in (torch.randn(8, 3), torch.ones(8, 3)):
        with pytest.warns(UserWarning, match="compares the probabilities of classes, but these labels"):
            keeper.penalty((x, wrong))
    soft = torch.randn(8, 3).softmax(1)
    soft[0] = 0.0  # a sample without a label
    with no_warning():
        for right in (soft, soft.bfloat16(), y):  # labels may be probabilities, as after mixup
            keeper.penalty((x, right))
    with pytest.raises(ValueError, match="got no samples"):
        keeper.penalty((x[:0], y[:0]))


def test_the_sampled_fisher_finds_the_classes_of_pixels() -> None:
    x, y = torch.randn(300, 4, 2, 5), torch.randint(3, (300, 2, 5))
    sums = []
    for last in (False, True):
        torch.manual_seed(3)
        keeper = selfless.attach(Pixels(last), EWC(1.0, fisher="sampled"))
        keeper.consolidate([(x, y)])
        sums.append(float(keeper.state["omega"]["net.2.bias"].sum()))
    assert sums[0] == pytest.approx(sums[1], rel=0.3)
    with pytest.warns(UserWarning, match="takes the last axis of the outputs"):
        selfless.attach(Pixels(), EWC(1.0, fisher="sampled")).consolidate([x])


@pytest.mark.parametrize("method", [EWC(1.0), EBLL(1.0)], ids=str)
def test_labels_of_another_shape_are_named(method: Any) -> None:
    x, y = data()[0]
    with pytest.raises(ValueError, match=r"labels of shape \(8, 3\) do not fit an output of shape \(8, 3\): .*argmax"):
        selfless.attach(network(), method).consolidate([(x, F.one_hot(y, 3))])


# ----------------------------------------------------------------------------------------------------------------- save and go on
@pytest.mark.parametrize("method", [PackNet(0.5), LwF(1.0, warmup=1)], ids=str)
def test_an_epoch_that_goes_on_after_loading_does_not_begin_its_phase_again(method: Any) -> None:
    model, batches = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    keeper = selfless.attach(model, method).anchor_with(optimizer)
    keeper.begin_epoch(0, 2)
    train(model, keeper, batches, optimizer)
    keeper.begin_epoch(1, 2)
    keeper.consolidate(batches)
    keeper.begin_epoch(0, 2)
    train(model, keeper, data(1), optimizer)
    weights, state = {n: t.clone() for n, t in model.state_dict().items()}, keeper.state_dict()

    again = network()
    again.load_state_dict(weights)
    resumed = selfless.attach(again, method)
    resumed.load_state_dict(state)
    resumed.begin_epoch(0, 2)
    assert all(torch.equal(t, weights[n]) for n, t in again.state_dict().items())
    assert resumed.parts[0].distilled == keeper.parts[0].distilled == (3 if isinstance(method, LwF) else 0)
    if isinstance(method, PackNet):
        resumed.begin_epoch(0, 2)  # a second time it is the task that begins again
        assert not all(torch.equal(t, weights[n]) for n, t in again.state_dict().items())
        resumed.begin_epoch(1, 2)
        assert any(bool(mask.any()) for mask in resumed.state["pruned"].values()), "the next phase begins"


def test_another_number_of_epochs_after_loading_begins_the_task_again() -> None:
    """With more epochs the phases lie elsewhere, so an epoch of the same number is not the one that was saved."""
    model, batches = network(), data()
    keeper = selfless.attach(model, PackNet(0.5))
    keeper.begin_epoch(0, 2)
    train(model, keeper, batches)
    keeper.begin_epoch(1, 2)
    keeper.consolidate(batches)
    keeper.begin_epoch(0, 2)
    train(model, keeper, data(1))
    trained = {n: t.clone() for n, t in model.state_dict().items()}
    for epochs in (2, 4):
        again = network()
        again.load_state_dict(trained)
        resumed = selfless.attach(again, PackNet(0.5))
        resumed.load_state_dict(keeper.state_dict())
        resumed.begin_epoch(0, epochs)
        assert all(torch.equal(t, trained[n]) for n, t in again.state_dict().items()) is (epochs == 2)


def test_gates_go_on_after_loading() -> None:
    model, batches = network(), data()
    keeper = selfless.attach(model, HAT(0.1), layers=["1"])
    keeper.begin_epoch(0, 2, batches=2 * len(batches))
    train(model, keeper, batches)
    gates = keeper.state["embedding"]["all"].clone()
    resumed = selfless.attach(network(), HAT(0.1), layers=["1"])
    resumed.load_state_dict(keeper.state_dict())
    resumed.begin_epoch(0, 2, batches=2 * len(batches))
    assert torch.equal(resumed.state["embedding"]["all"], gates)


@pytest.mark.filterwarnings("error")
def test_a_task_that_was_loaded_in_its_last_epoch_had_its_phases() -> None:
    model, batches = network(), data()
    keeper = selfless.attach(model, PackNet(0.5))
    for epoch in range(2):
        keeper.begin_epoch(epoch, 2)
        train(model, keeper, batches)
    resumed = selfless.attach(network(), PackNet(0.5))
    resumed.model.load_state_dict(model.state_dict())
    resumed.load_state_dict(keeper.state_dict())
    train(resumed.model, resumed, batches)
    resumed.consolidate(batches)


# ------------------------------------------------------------------------------------------------------------- changes of a model
@pytest.mark.parametrize("method", [MAS(0.1), LwF(1.0)], ids=str)
def test_parameters_with_other_names_are_said(method: Any) -> None:
    model, batches = network(), data()
    weight_norm(model[0])
    keeper = selfless.attach(model, method)
    train(model, keeper, batches)
    keeper.consolidate(batches)
    with no_warning():
        train(model, keeper, batches)
    keeper.consolidate(batches)
    parametrize.remove_parametrizations(model[0], "weight")
    with pytest.warns(UserWarning, match=r"the model has no '0\.parametrizations.* any more.* but '0\.weight' with nearly the same values"):
        train(model, keeper, batches)


def test_a_new_head_is_no_renamed_layer() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads, self.task = nn.Linear(5, 6), nn.ModuleList([nn.Linear(6, 3)]), 0

        def forward(self, x: Tensor) -> Tensor:
            head: nn.Module = self.heads[self.task]
            return head(self.body(x).relu())

    model, batches = Heads(), data()
    keeper = selfless.attach(model, MAS(0.1), heads=["heads.0", "heads.1"])
    train(model, keeper, batches)
    keeper.consolidate(batches)
    model.heads.append(nn.Linear(6, 3))
    model.task = 1
    with no_warning():
        train(model, keeper, batches)


def test_a_head_that_takes_the_place_of_another_is_no_renamed_layer() -> None:
    model = nn.ModuleDict({"body": nn.Linear(5, 6), "a": nn.Linear(6, 3)})
    model.forward = lambda x: model["a" if "a" in model else "b"](model["body"](x).relu())  # type: ignore[method-assign]
    keeper = selfless.attach(model, MAS(0.1))
    train(model, keeper, data())  # type: ignore[arg-type]
    keeper.consolidate(data())
    del model["a"]
    model["b"] = nn.Linear(6, 3)
    with no_warning():
        train(model, keeper, data())  # type: ignore[arg-type]


class Tasks(nn.Module):
    """One body, three heads; the task is an argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body, self.heads = nn.Linear(5, 6), nn.ModuleList([nn.Linear(6, 3) for _ in range(3)])

    def forward(self, x: Tensor, task: int) -> Tensor:
        head: nn.Module = self.heads[task]
        return head(self.body(x).relu())


def train_tasks(keeper: selfless.Keeper, model: Tasks, make: Callable[[int], Any]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for t in range(3):
        for x, y in data(t):
            loss = F.cross_entropy(model(x, t), y) + keeper.penalty((x, y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        keeper.consolidate(data(t), forward=make(t))


def test_a_forward_that_reads_the_loop_variable_is_said() -> None:
    model, now = Tasks(), 0

    def late(t: int) -> Any:
        nonlocal now
        now = t
        return lambda m, b: m(b[0], now)

    keeper = selfless.attach(model, LwF(1.0), heads=["heads.0", "heads.1", "heads.2"])
    with pytest.warns(UserWarning, match=r"the forward= of task 1 reads the variable 'now', which was 0 and is 1 now"):
        train_tasks(keeper, model, late)


@pytest.mark.parametrize("make", [lambda t: lambda m, b, t=t: m(b[0], t), lambda t: lambda m, b: m(b[0], t)], ids=["bound", "own"])
def test_a_forward_that_keeps_its_task_is_not_said(make: Callable[[int], Any]) -> None:
    model = Tasks()
    keeper = selfless.attach(model, LwF(1.0), heads=["heads.0", "heads.1", "heads.2"])
    with no_warning():
        train_tasks(keeper, model, make)


def test_a_forward_may_read_what_does_not_choose_the_task() -> None:
    """A counter of its own, an attribute with the name of a global variable, a flag."""

    def make(t: int) -> Any:
        def forward(m: Any, b: Any, t: int = t) -> Tensor:
            global CALLS
            CALLS += 1
            head: Tensor = m.heads[t](m.body(b[0]).relu())
            return head

        global heads
        heads = t
        return forward

    model = Tasks()
    keeper = selfless.attach(model, LwF(1.0), heads=["heads.0", "heads.1", "heads.2"])
    with no_warning():
        train_tasks(keeper, model, make)


CALLS, heads = 0, 0


def test_a_frozen_head_is_named_at_the_end_of_its_task() -> None:
    model, batches = network(), data()
    keeper = selfless.attach(model, LwF(1.0), heads=["2", "2"])
    keeper.consolidate(batches)
    model[2].requires_grad_(False)
    train(model, keeper, batches)
    with pytest.raises(ValueError, match="the head '2' of task 2 is frozen"):
        keeper.consolidate(batches)


@pytest.mark.parametrize("method", [MAS(1.0), SI(1.0), LwF(1.0)], ids=str)
def test_complex_parameters_are_refused(method: Any) -> None:
    model = nn.Linear(2, 2)
    model.spectrum = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="'spectrum' is complex"):
        selfless.attach(model, method)
    selfless.attach(model, method, parameters=["weight", "bias"]).detach()
    selfless.attach(model, PackNet(0.5))  # compares no values


# ------------------------------------------------------------------------------------------------------------- nothing is measured
class Embedding(nn.Module):
    """An embedding of length 1, as metric learning has it: ‖f‖² does not depend on any weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.net(x), dim=1)


def test_a_strength_that_was_measured_on_rounding_errors_is_said() -> None:
    model = Embedding()
    with pytest.warns(UserWarning, match=r"the strength of mas:auto is .*, because Ω is nearly 0"):
        selfless.attach(model, MAS("auto")).consolidate(data())
    with no_warning():
        selfless.attach(Embedding(), MAS("auto")).consolidate(data(), forward=lambda m, b: m.net(b[0]))


def test_a_network_that_is_sure_has_a_large_strength_of_ewc() -> None:
    model = network()
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.copy_(torch.tensor([30.0, 0.0, 0.0]))
    with no_warning():
        keeper = selfless.attach(model, EWC("auto"))
        keeper.consolidate([(x, torch.zeros_like(y)) for x, y in data()])
    assert (keeper.strengths["ewc"] or 0) > 1e6


def test_a_task_that_ends_twice_is_said_without_hidden_linear_layers() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(5, 3))
    keeper = selfless.attach(model, MAS(0.1))
    train(model, keeper, data())
    keeper.consolidate(data())
    with pytest.warns(UserWarning, match="twice with the same data"):
        keeper.consolidate(data())
