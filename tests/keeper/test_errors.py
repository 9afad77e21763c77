"""Bad input: one message that names it, and the state stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import MAS, SLNID, SNI, LwF, OrthReg
from selfless.keeper.activations import resolve_layers
from tests.keeper.nets import Net, batches, seeded, sequential


def test_bad_input_at_attach() -> None:
    model = seeded()
    with pytest.raises(ValueError, match=r"layer 'fc9' is not in the model; its layers are fc1, fc2, head"):
        selfless.attach(model, sparsify=SNI(1.0), layers=["fc9"])
    with pytest.raises(ValueError, match="must be finite and ≥ 0"):
        MAS(-1.0)
    with pytest.raises(TypeError, match="plain number"):
        SLNID(torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="preserve= takes one of"):
        selfless.attach(model, SLNID(1e-3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"preserve= takes one of .*; write MAS\(…\)$"):
        selfless.attach(model, MAS)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"not <class 'int'>$"):
        selfless.attach(model, int)  # type: ignore[arg-type]
    for sparsify in (SLNID(1e-3), OrthReg(1e-3)):
        with pytest.raises(ValueError, match="found no hidden"):
            selfless.attach(nn.Sequential(nn.Linear(6, 3)), None, sparsify)
    with pytest.raises(ValueError, match="Did you mean 'slnid'"):
        selfless.attach(model, "mas:0.1", "slni d:1")
    with pytest.raises(ValueError, match="no trainable parameters"):
        selfless.attach(seeded().requires_grad_(False), MAS())
    with pytest.raises(ValueError, match="no trainable parameters"):
        selfless.attach(nn.Sequential(nn.ReLU()), MAS())
    with pytest.raises(ValueError, match="discount"):
        SLNID(1e-3, discount="sum")  # type: ignore[arg-type]


def test_a_compiled_model_hides_functions_but_not_modules() -> None:
    with pytest.raises(ValueError, match=r"layer 'fc1' is inside a compiled model.*name its activation module instead"):
        resolve_layers(seeded(), ["fc1"], (), compiled=True, needed=True)
    with pytest.raises(ValueError, match="found no layer for the sparsifier in the compiled model"):
        resolve_layers(seeded(), "auto", (), compiled=True, needed=True)
    assert resolve_layers(seeded(), "auto", (), compiled=True, needed=False) == {}
    assert list(resolve_layers(seeded(sequential), ["1", "3"], (), compiled=True, needed=True)) == ["1", "3"]


def test_a_remedy_names_the_explicit_anchor() -> None:
    for implicit in (False, True):
        model = seeded()
        keeper = selfless.attach(model, MAS(1e300))
        keeper.consolidate(batches())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            model.fc1.weight.add_(1e3)
        if implicit:
            keeper.anchor_with(optimizer)
            assert keeper.penalty() == 0
        else:
            with pytest.raises(ValueError, match=r"the penalty is not finite.*try keeper\.anchor_with\(optimizer\)"):
                keeper.penalty()


def test_no_batches_before_any_forward_pass() -> None:
    keeper = selfless.attach(seeded(), MAS(0.1))
    for empty in ([], iter(())):
        with pytest.raises(ValueError, match="batches are empty"):
            keeper.consolidate(empty)


def test_a_head_that_is_not_trained_is_named_when_the_task_ends() -> None:
    model = seeded()
    keeper = selfless.attach(model, LwF(1.0), heads=["head"])
    model.head.requires_grad_(False)
    with pytest.raises(ValueError, match="the head 'head' of task 1 is frozen, or parameters= leaves it out"):
        keeper.consolidate(batches())


@pytest.mark.parametrize("name", ["heads", "heads.*", "heads.[01]"])
def test_a_container_of_heads_is_no_head(name: str) -> None:
    model = nn.ModuleDict({"body": nn.Linear(6, 4), "heads": nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])})
    with pytest.raises(ValueError, match=r"is no single head; name each one, .*: heads=\['heads\.0', 'heads\.1'\]"):
        selfless.attach(model, MAS(0.1), heads=[name])


def test_a_container_may_be_one_head() -> None:
    class Chain(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer(x)
            return x

    def chain() -> Any:
        return Chain([nn.Linear(4, 3), nn.Linear(3, 2)])

    two = nn.ModuleDict({"body": nn.Linear(6, 4), "a": chain(), "b": nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 2)])})
    assert selfless.attach(two, MAS(0.1), heads=["a", "b"]).heads == ("a", "b")
    for name in ("a", "b"):
        assert selfless.attach(copy.deepcopy(two), MAS(0.1), heads=[name]).heads == (name,)


def test_lbfgs_has_no_implicit_anchor() -> None:
    model = seeded()
    keeper = selfless.attach(model, MAS(0.1))
    with pytest.raises(ValueError, match=r"LBFGS learns the curvature .* leave anchor_with\(\) out"):
        keeper.anchor_with(torch.optim.LBFGS(model.parameters()))
    assert not keeper.implicit


def test_the_number_of_forwards_is_checked() -> None:
    model = seeded()
    keeper = selfless.attach(model, LwF(1.0))
    keeper.consolidate(batches())
    keeper.consolidate(batches(1))
    with pytest.raises(ValueError, match="forwards has 1 entries, but the state has 2 tasks"):
        selfless.attach(copy.deepcopy(model), LwF(1.0)).load_state_dict(keeper.state_dict(), forwards=[None])


def test_bad_input_in_the_loop_leaves_the_state_alone() -> None:
    model, (x, y) = seeded(), batches()[0]
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3), layers=["fc1", "fc2"])
    with pytest.raises(RuntimeError, match=r"no forward pass .*since the last"):
        keeper.penalty()
    model(x)
    keeper.penalty()
    keeper.consolidate(batches())
    saved = keeper.state_dict()
    with pytest.raises(RuntimeError, match=r"no forward pass .*since the last"):
        keeper.penalty()
    model(x * float("nan"))
    with pytest.raises(ValueError, match="layer 'fc1' has NaN"):
        keeper.penalty()
    with pytest.raises(ValueError, match="batches are empty"):
        keeper.consolidate([])
    with pytest.raises(ValueError, match="not finite"):
        keeper.consolidate([(x * float("inf"), y)])
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match="none of the model's"):
        keeper.anchor_with(other)
    for key, value in keeper.state_dict().items():
        assert_close(value, saved[key])
    model(x)
    assert torch.isfinite(keeper.penalty())


def test_unreached_layers_and_silent_layers() -> None:
    class Spare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spare, self.act = nn.Linear(4, 4), nn.ReLU()

    model, (x, _) = seeded(Spare), batches()[0]
    keeper = selfless.attach(model, MAS(), SNI(1.0), layers=["fc1", "act"])
    model(x)
    with pytest.raises(RuntimeError, match="layer 'act' was never reached"):
        keeper.penalty()
    with pytest.raises(ValueError, match="layer 'act' was never reached"):
        keeper.consolidate(batches())
    model = seeded()
    keeper = selfless.attach(model, sparsify=SNI(1.0), layers=["head"])
    model(x)
    with pytest.raises(RuntimeError, match="found no activation right after layer 'head'"):
        keeper.penalty()


def test_resized_parameters_are_named() -> None:
    model = seeded()
    keeper = selfless.attach(model, MAS(0.1), layers=["fc1"])
    keeper.consolidate(batches())
    model.head = nn.Linear(12, 5)
    with pytest.raises(ValueError, match=r"'head.weight' was \(3, 12\) .* is \(5, 12\) now"):
        keeper.penalty()


@pytest.mark.parametrize(
    ("given", "message"), [("pair", r"wrap a single batch as \[\(x, y\)\]"), (None, "not None"), ("tensor", r"as \[x\]")]
)
def test_what_is_no_loader_is_refused(given: str | None, message: str) -> None:
    pair = batches()[0]
    with pytest.raises(TypeError, match=message):
        selfless.attach(seeded(), MAS(0.1)).consolidate({"pair": pair, "tensor": pair[0]}.get(given or ""))  # type: ignore[arg-type]


def test_a_model_that_takes_more_is_told_how_to_be_called() -> None:
    model = seeded(lambda: nn.Bilinear(6, 6, 3))
    with pytest.raises(TypeError) as caught:
        selfless.attach(model, MAS(0.1)).consolidate(batches())
    assert any("forward=" in note for note in caught.value.__notes__)


def test_an_activation_that_is_not_recognised_is_said_to_be_so() -> None:
    class Odd(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.glu(self.fc2(self.fc1(x)).repeat(1, 2)))

    model = seeded(Odd)
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3))
    model(batches()[0][0])
    with pytest.raises(RuntimeError, match="no activation function of torch right after any hidden layer"):
        keeper.penalty()


@pytest.mark.parametrize("preserve", ["replay:1", "der:1", "ewc:1", "imm:1", "ebll:1"])
@pytest.mark.parametrize("wrong", [-1, 5])
def test_labels_that_are_no_column_of_the_output(preserve: str, wrong: int) -> None:
    model, (x, y) = seeded(), batches()[0]
    keeper = selfless.attach(model, preserve)
    columns = model(x).shape[1]
    with pytest.raises(
        ValueError, match=rf"a label of these batches is {wrong}, but .* {columns} columns, so labels are 0 … {columns - 1}; "
    ):
        keeper.consolidate([(x, y), (x, y.clone().index_fill_(0, torch.tensor([2]), wrong))])
    assert keeper.tasks == 0


def test_ignored_positions_are_no_wrong_labels() -> None:
    model, (x, y) = seeded(), batches()[0]
    ignored = y.clone().index_fill_(0, torch.tensor([2]), -100)
    selfless.attach(model, "ewc:1").consolidate([(x, ignored)])
    with pytest.raises(ValueError, match="is -100"):
        selfless.attach(seeded(), "replay:1").consolidate([(x, ignored)])


def test_arguments_of_a_wrong_kind() -> None:
    model, (x, y) = seeded(), batches()[0]
    keeper = selfless.attach(model, MAS(0.1))
    with pytest.raises(TypeError, match=r"evaluating takes the number of a task, counted from 0, not 'a'; write"):
        keeper.evaluating("a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"capacity\('a'\): the threshold must be a number ≥ 0"):
        keeper.capacity("a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a function of \(model, batch\), but yours takes \(m\); write forward=lambda model, batch"):
        keeper.consolidate([(x, y)], forward=lambda m: m)  # type: ignore[arg-type, misc]
    with pytest.raises(TypeError, match=r"a function of \(model, batch\), not 3"):
        selfless.importance.mas(model, [(x, y)], forward=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"state_device is 'gpu0', which torch does not know; choose \"cpu\""):
        selfless.attach(seeded(), MAS(0.1), state_device="gpu0")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch finds no GPU on this machine"):
            selfless.attach(seeded(), MAS(0.1), state_device="cuda")


def test_a_wrong_name_of_a_head_is_found_before_training() -> None:
    with pytest.raises(ValueError, match=r"heads= names '1', but a ReLU has no parameters; name the output layer"):
        selfless.attach(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), MAS(1.0), heads=["1"])
    with pytest.raises(ValueError, match=r"heads= names 'haeds\.0', but the model has no module 'haeds' to hold it; did you mean 'head'"):
        selfless.attach(seeded(), MAS(0.1), heads=["haeds.0"])
    model, (x, _) = seeded(), batches()[0]
    keeper = selfless.attach(model, MAS(0.1), heads=["haed"])  # a head may be added later
    model(x)
    with pytest.raises(ValueError, match=r"names 'haed' for task 1, but no parameter .* add it before the task, .*; did you mean 'head'\?"):
        keeper.penalty()
    model.haed = nn.Linear(2, 2)
    keeper.penalty()


def test_capacity_before_the_first_task_ends_says_when_it_is_measured() -> None:
    model = seeded()
    keeper = selfless.attach(model, MAS(0.1), SLNID(1e-3), layers=["fc1", "fc2"])
    assert "neurons     not measured yet: consolidate() measures them when a task ends" in str(keeper.capacity())
    keeper.consolidate(batches())
    assert "not measured" not in str(keeper.capacity())


def test_gates_name_the_activation_modules_of_a_class() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.act, self.head = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.fc(x)))  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match=r"none is known to follow 'fc': name them: layers=\['act'\]"):
        selfless.attach(Own(), "hat")
    assert list(selfless.attach(Own(), "hat", layers=["act"]).taps) == ["act"]
