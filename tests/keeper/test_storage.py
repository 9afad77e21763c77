"""Options that lower the memory of a keeper: precision and device of its state, some parameters only, pieces."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import EWC, HAT, IMM, MAS, SI, SLNID, LwF, OnlineEWC, PackNet, RWalk
from selfless.keeper import pieces
from tests.keeper.nets import Net, batches, seeded, train

SPLIT = [MAS(2.0), EWC(2.0), EWC(2.0, mode="per-task"), OnlineEWC(2.0), SI(2.0), IMM(1e-2), LwF(1.0), PackNet(0.5)]


def two_tasks(model: nn.Module, preserve: Any, **options: Any) -> Any:
    keeper = selfless.attach(model, preserve, SLNID(1e-3), **options)
    for task in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        keeper.anchor_with(optimizer)
        for epoch in range(2):
            keeper.begin_epoch(epoch, 2, batches=4)
            for x, y in batches(task):
                optimizer.zero_grad()
                (F.cross_entropy(model(x), y) + keeper.penalty((x, y))).backward()
                optimizer.step()
        if task == 1:
            model.fc1.bias.requires_grad_(False)  # a parameter that the second task does not have
        keeper.consolidate(batches(task))
    return keeper


@pytest.mark.parametrize("term", SPLIT, ids=str)
@pytest.mark.slow
def test_consolidating_in_pieces_is_consolidating_at_once(term: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`splits` is a promise: pieces of 25 entries give the same state as one call."""
    monkeypatch.setattr(pieces, "PIECE", {"cpu": 25, "other": 25})
    model = seeded()
    small = two_tasks(model, term).states
    monkeypatch.setattr(type(term), "splits", "whole")
    want = two_tasks(seeded(), term).states
    for state, other in zip(small, want, strict=True):
        assert state.keys() == other.keys()
        for group in state:
            assert state[group].keys() == other[group].keys(), group
            for name, value in state[group].items():
                assert_close(value, other[group][name])


def test_a_subclass_with_its_own_consolidate_promises_nothing() -> None:
    class Mean(MAS):
        def consolidate(self, state: Any, parameters: Any, omega: Any) -> Any:
            return super().consolidate(state, parameters, {n: t.mean().expand_as(t).clone() for n, t in omega.items()})

    class Same(MAS):
        pass

    assert (Mean.splits, Same.splits, RWalk.splits) == ("whole", "entries", "whole")
    keepers = [selfless.attach(seeded(), kind(1.0)) for kind in (Mean, Same)]
    for keeper in keepers:
        keeper.consolidate(batches())
    mean, plain = (keeper.state["omega"]["fc1.weight"] for keeper in keepers)
    assert_close(mean, plain.mean().expand_as(plain))


def test_a_failed_consolidation_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", {"cpu": 25, "other": 25})
    model = seeded()
    keeper = selfless.attach(model, SI(1.0))
    keeper.anchor_with(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, keeper, torch.optim.SGD(model.parameters(), lr=0.1), batches(), epochs=1)
    keeper.consolidate(batches())
    keeper.state["path"]["head.bias"][2] = torch.inf  # the last parameter: pieces before it must not be written
    before = {g: {n: t.clone() for n, t in keeper.state[g].items()} for g in ("omega", "anchor", "path")}
    with torch.no_grad():
        model.fc1.weight.add_(1.0)
    with pytest.raises(ValueError, match=r"'head\.bias' is not finite"):
        keeper.consolidate(batches())
    for group, tensors in before.items():
        for name, value in tensors.items():
            assert torch.equal(keeper.state[group][name], value), (group, name)


@pytest.mark.parametrize("splits", ["whole", "entries"])
def test_negative_importances_of_a_custom_method_are_refused(splits: Any) -> None:
    def consolidate(self: MAS, state: Any, parameters: Any, omega: Any) -> Any:
        return MAS.consolidate(self, state, parameters, {n: -t for n, t in omega.items()})

    signed = type("Signed", (MAS,), {"consolidate": consolidate, "splits": splits})
    keeper = selfless.attach(seeded(), signed(0.1))
    with pytest.raises(ValueError, match=r"the importance of 'fc1\.weight' is negative; .* omega\.abs\(\)"):
        keeper.consolidate(batches())
    assert keeper.tasks == 0


@pytest.mark.filterwarnings("ignore:.* has changed since task")  # weights are moved by hand
def test_importances_in_bfloat16_and_anchors_in_full() -> None:
    plain, small = two_tasks(seeded(), MAS(2.0)), two_tasks(seeded(), MAS(2.0), state_dtype=torch.bfloat16)
    for name, omega in small.state["omega"].items():
        assert omega.dtype == torch.bfloat16
        assert small.state["anchor"][name].dtype == torch.float32  # the rounding of θ* would be larger than the drift
        assert_close(omega.float(), plain.state["omega"][name], rtol=0.02, atol=1e-4)
        assert_close(small.state["anchor"][name], plain.state["anchor"][name], rtol=1e-3, atol=1e-4)
    for keeper in (plain, small):
        keeper.implicit = False
        with torch.no_grad():
            for p in keeper.model.parameters():
                p.add_(0.01)
        keeper.model(batches()[0][0])
    assert_close(small.penalty(), plain.penalty(), rtol=0.01, atol=1e-6)
    assert small.log()["anchor"] == pytest.approx(plain.log()["anchor"], rel=0.01)


@pytest.mark.parametrize("splits", ["entries", "whole"])
def test_a_model_in_bfloat16_keeps_its_anchor_in_bfloat16(splits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MAS, "splits", splits)
    model = seeded().bfloat16()
    keeper = selfless.attach(model, MAS(1.0), state_dtype=torch.bfloat16)
    keeper.consolidate([(x.bfloat16(), y) for x, y in batches()])
    for name, p in model.named_parameters():
        assert keeper.state["anchor"][name].dtype == torch.bfloat16
        assert torch.equal(keeper.state["anchor"][name], p.detach())


@pytest.mark.parametrize("term", [MAS(2.0), SI(2.0), LwF(1.0), PackNet(0.5), IMM(1e-2), LwF(1.0) + EWC(1.0)], ids=str)
def test_every_method_works_with_another_storage(term: Any) -> None:
    """The state of a CPU model on the CPU is stored there twice over: it is loaded for every use, and results stay."""
    model, other = seeded(), seeded()
    plain, stored = two_tasks(model, term), two_tasks(other, term, state_device="cpu")
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(q, p)
    with plain.evaluating(0), stored.evaluating(0):
        assert_close(other(batches()[0][0]), model(batches()[0][0]))
    again = selfless.attach(copy.deepcopy(other), term, SLNID(1e-3), state_device="cpu", state_dtype=torch.bfloat16)
    again.load_state_dict(stored.state_dict())
    assert again.tasks == 2


def test_only_some_parameters_are_preserved() -> None:
    choices: list[Any] = [["fc1", "head.bias"], "fc1.*", lambda name, p: p.dim() > 1, ["fc2.weight"]]
    wanted = [
        {"fc1.weight", "fc1.bias", "head.bias"},
        {"fc1.weight", "fc1.bias"},
        {"fc1.weight", "fc2.weight", "head.weight"},
        {"fc2.weight"},
    ]
    full = selfless.attach(seeded(), MAS(1e6), SLNID(1e-3))
    full.consolidate(batches())
    for choice, names in zip(choices, wanted, strict=True):
        model = seeded()
        keeper = selfless.attach(model, MAS(1e6), SLNID(1e-3), parameters=choice)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        keeper.anchor_with(optimizer)
        keeper.consolidate(batches())
        assert keeper.state["omega"].keys() == keeper.state["anchor"].keys() == names
        for name in names:
            assert_close(keeper.state["omega"][name], full.state["omega"][name])
        assert_close(keeper.alpha, full.alpha)
        assert all(p.requires_grad for p in model.parameters())
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        train(model, keeper, optimizer, batches(1), epochs=1)
        for name, p in model.named_parameters():
            held = full.state["omega"][name] > 1e-2
            moved = (p.detach() - before[name])[held].abs().max()
            assert (moved < 1e-4) == (name in names), name


@pytest.mark.parametrize("term", [SI(1.0), RWalk(1.0), LwF(1.0)], ids=str)
def test_no_group_has_a_parameter_that_was_not_chosen(term: Any) -> None:
    model = seeded()
    keeper = selfless.attach(model, term, parameters=["fc1"])
    train(model, keeper, torch.optim.SGD(model.parameters(), lr=0.05), batches(), epochs=1)
    keeper.consolidate(batches())
    groups = [group.name for group in term.groups if group.like_parameter and keeper.state[group.name]]
    assert "anchor" in groups
    for group in groups:
        assert keeper.state[group].keys() == {"fc1.weight", "fc1.bias"}, group


def test_a_state_of_chosen_parameters_is_no_protection_of_the_others() -> None:
    model = seeded()
    with selfless.attach(model, MAS(1.0), parameters=["fc1"]) as keeper:
        keeper.consolidate(batches())
        saved = keeper.state_dict()
    with selfless.attach(model, MAS(1.0)) as other, pytest.warns(UserWarning, match="attach with the same parameters="):
        other.load_state_dict(saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with selfless.attach(model, MAS(1.0), parameters=["fc1"]) as same:
            same.load_state_dict(saved)
            assert same.state_dict().keys() == saved.keys()
        for name in ("fc2", "head"):
            model.get_submodule(name).requires_grad_(False)
        with selfless.attach(model, MAS(1.0)) as equal:  # all that trains
            equal.load_state_dict(saved)


def test_storage_options_are_checked() -> None:
    with pytest.raises(ValueError, match=r"state_dtype is torch\.float16; choose torch\.bfloat16"):
        selfless.attach(seeded(), MAS(1.0), state_dtype=torch.float16)
    with pytest.raises(ValueError, match="names 'fc9', but no parameter"):
        selfless.attach(seeded(), MAS(1.0), parameters=["fc9"])
    with pytest.raises(ValueError, match="chooses no parameter"):
        selfless.attach(seeded(), MAS(1.0), parameters=lambda n, p: False)
    with pytest.raises(ValueError, match="needs all parameters"):
        selfless.attach(seeded(), PackNet(0.5), parameters=["fc1"])
    with pytest.raises(ValueError, match="leave state_dtype and state_device out"):
        selfless.attach(seeded(), IMM(1e-3, drop=0.5), state_device="cpu")
    assert HAT.splits == "parameters"


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.act, self.head = nn.Embedding(40, 8, sparse=sparse), nn.ReLU(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.table(x).mean(1)))


def words() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randint(0, 40, (4, 2), generator=g), torch.randint(0, 3, (4,), generator=g)) for _ in range(6)]


@pytest.mark.parametrize("term", [MAS(5.0), EWC(50.0, mode="per-task")], ids=str)
def test_rows_without_a_gradient_are_skipped_and_nothing_changes(term: Any) -> None:
    """Sparse gradients train an embedding as dense ones do, where every row is pulled; with per-task anchors unread rows move too."""
    found = []
    for sparse in (True, False):
        model = seeded(lambda sparse=sparse: Words(sparse))
        keeper = selfless.attach(model, term)
        optimizer = torch.optim.SGD([model.table.weight], lr=0.5)
        keeper.anchor_with(optimizer)
        for _ in range(3):
            for x, y in words()[:2] if keeper.tasks else words():
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            keeper.consolidate(words())
        found.append(model.table.weight.detach().clone())
    assert_close(found[0], found[1])


def test_sparse_adam() -> None:
    model = seeded(lambda: Words(sparse=True))
    keeper = selfless.attach(model, MAS(1e9))
    optimizer = torch.optim.SparseAdam([model.table.weight], lr=0.1)
    keeper.anchor_with(optimizer)
    keeper.consolidate(words())
    before = model.table.weight.detach().clone()
    for x, y in words()[:2]:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    read = torch.zeros(40, dtype=torch.bool)
    read[torch.cat([x.flatten() for x, _ in words()[:2]])] = True
    assert torch.equal(model.table.weight[~read], before[~read])
    important = keeper.state["omega"]["table.weight"] > 1e-3
    assert_close(model.table.weight.detach()[important], before[important], rtol=0, atol=1e-4)


def turned() -> nn.Module:
    """A network with a weight that is not contiguous."""
    model = Net()
    model.fc2.weight = nn.Parameter(model.fc2.weight.detach().T.contiguous().T)
    return model


@pytest.mark.parametrize("term", [MAS(5.0), LwF(5.0)], ids=str)
def test_the_log_is_the_same_in_pieces(term: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size in (25, 10**9):
        monkeypatch.setattr(pieces, "PIECE", {"cpu": size, "other": size})
        model = seeded(turned)
        keeper = selfless.attach(model, term)
        keeper.consolidate(batches())
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.1)
        found.append(keeper.log())
    assert found[0]["drift/relative"] == pytest.approx(0.1, rel=1e-4)
    assert found[0] == pytest.approx(found[1])


def test_the_implicit_anchor_is_the_same_in_pieces_and_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a common step size that is prepared, one for each entry, and a learning rate that is a tensor."""
    ways = (
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.SGD(p, lr=torch.tensor(0.05)),
    )
    found = []
    for size in (25, 60, 10**9):
        monkeypatch.setattr(pieces, "PIECE", {"cpu": size, "other": size})
        for optimizer in ways:
            model = seeded(turned)
            keeper = selfless.attach(model, MAS(5.0))
            opt = optimizer(model.parameters())
            keeper.anchor_with(opt)
            keeper.consolidate(batches())
            train(model, keeper, opt, batches(1), epochs=1)
            found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for small, middle, whole in zip(found[:3], found[3:6], found[6:], strict=True):
        assert_close(small, whole)
        assert_close(middle, whole)
