"""Sums of preservers and of sparsifiers: what may be summed trains, and every other sum is refused with the reason."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import selfless
from selfless import (
    EWC,
    MAS,
    SLNID,
    DeCov,
    LwF,
    NoSparsifier,
    OrthReg,
)
from selfless.preserve import PRESERVERS
from selfless.sparsify import SPARSIFIERS
from selfless.terms import parse
from selfless.testing.comparing import learn
from selfless.testing.small import small_net, small_task
from tests.test_contracts import PRESERVE

KINDS: dict[str, Any] = {preserve.name: preserve for preserve in reversed(PRESERVE.values()) if preserve.name != "none"}  # one row a kind
REFUSED = {
    ("packnet", "hat"): "both reserve weights or neurons for each task",
    ("hat", "lwf"): "runs the network of old tasks",
    ("hat", "ebll"): "runs the network of old tasks",
    ("hat", "imm"): "imm evaluates tasks with other weights than the trained ones",
    ("hat", "replay"): "runs old samples",
    ("hat", "der"): "runs old samples",
    ("replay", "der"): "der is a variant of replay",
    ("packnet", "imm"): "both decide which parameters a task is evaluated with",
    ("packnet", "ebll"): "Without a warm-up it can: write ebll:2,",
    ("ewc", "ewc-online"): "ewc-online is a variant of ewc",
    ("lwf", "ebll"): "ebll is a variant of lwf",
    ("gpm", "sgp"): "sgp is a variant of gpm",
    **{
        (a, b): f"{b} sets weights to other values than the optimizer's"
        for a in ("gpm", "sgp")
        for b in ("packnet", "hat", "imm", "ags-cl")
    },
    **{("ags-cl", b): f"ags-cl restarts neurons that {b} may have kept" for b in ("packnet", "hat", "imm")},
}


def may_be(a: str, b: str) -> bool:
    return (a, b) not in REFUSED and (b, a) not in REFUSED


@pytest.mark.parametrize("pair", REFUSED, ids="+".join)
def test_a_sum_that_cannot_be_is_refused_with_the_reason(pair: tuple[str, str]) -> None:
    a, b = (KINDS[name] for name in pair)
    for one, other in ((a, b), (b, a)):
        with pytest.raises(ValueError, match=REFUSED[pair]) as refused:
            one + other
        assert str(refused.value).startswith(f"{one.name} + {other.name} cannot be combined: ")  # in the user's order
    with pytest.raises(ValueError, match=REFUSED[pair]):
        parse(f"{a}+{b}", PRESERVERS, "preserver")
    with pytest.raises(TypeError, match="do not add up"):
        a + SLNID()
    with pytest.raises(TypeError):
        a + 1  # type: ignore[operator]


@pytest.mark.parametrize(("a", "b"), [pair for pair in itertools.combinations(KINDS, 2) if may_be(*pair)][::2])
@pytest.mark.slow
def test_a_sum_of_preservers_trains_and_each_part_keeps_its_own_state(a: str, b: str) -> None:
    total, model = KINDS[a] + KINDS[b], small_net()
    keeper = selfless.attach(model, total)
    alone = [selfless.attach(small_net(), KINDS[name]) for name in (a, b)]
    for seed in range(2):
        learn(model, keeper, small_task(seed), epochs=2)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    for state, twin in zip(keeper.states, alone, strict=True):
        assert set(state) == set(twin.state)
    twin_model = copy.deepcopy(model)
    for module in twin_model.modules():
        module._forward_hooks.clear()
    twin = selfless.attach(twin_model, str(total))
    assert twin.preserve == total
    twin.load_state_dict(keeper.state_dict())
    for key, value in keeper.state_dict().items():
        assert_close(twin.state_dict()[key], value)
    with pytest.raises(AttributeError, match=r"keeper\.states"):
        _ = keeper.state


def test_the_penalty_of_a_sum_is_the_sum_of_the_penalties() -> None:
    parts: Any = (MAS(0.5), EWC(5.0), LwF(2.0))
    values = []
    for preserve in (parts[0] + parts[1] + parts[2], *parts):
        model = small_net(torch.float64)
        keeper = selfless.attach(model, preserve, SLNID(1e-2) + DeCov(1e-2) if preserve is not parts[2] else None)
        keeper.consolidate(small_task(0, torch.float64))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05)
        model.eval()
        values.append(
            keeper.penalty(small_task(0, torch.float64)[0]) if preserve is parts[2] else quiet(keeper, small_task(0, torch.float64)[0])
        )
    assert_close(values[0], values[1] + values[2] + values[3])


def quiet(keeper: Any, batch: Any) -> Tensor:
    """The penalty without gradients: the sparsifier has no part in it."""
    with torch.no_grad():
        found: Tensor = keeper.penalty(batch)
        return found


def test_sparsifiers_add_up_too() -> None:
    values = []
    for sparsify in (SLNID(1e-2) + DeCov(1e-2) + OrthReg(1e-3), SLNID(1e-2), DeCov(1e-2), OrthReg(1e-3)):
        model = small_net(torch.float64)
        keeper = selfless.attach(model, sparsify=sparsify)
        model(small_task(0, torch.float64)[0][0])
        values.append(keeper.penalty())
    assert_close(values[0], values[1] + values[2] + values[3])
    assert SLNID(1e-2) + NoSparsifier() == SLNID(1e-2)
    assert str(SLNID(1e6) + DeCov(1e-2)) == "slnid:1e+06+decov:0.01"
    assert parse("slnid:1e+06+decov:0.01", SPARSIFIERS, "sparsifier") == SLNID(1e6) + DeCov(1e-2)
    with pytest.raises(ValueError, match=r"slnid \+ slnid cannot be combined: they are the same method. Write slnid once"):
        SLNID(1.0) + SLNID(2.0)


def test_a_sum_is_scaled_by_its_parts() -> None:
    total = SLNID(1e-3, sigma=4.0) + DeCov(1e-4)
    scaled = total.with_strength(0.5)
    assert scaled.parts[0] == SLNID(0.5, sigma=4.0)
    assert scaled.strength == 0.5
    assert scaled.parts[1].strength == pytest.approx(0.05)
    assert total.with_strength(total.strength) == total
    assert total.neutral().strength == 0
    assert total.neutral().neutral() == total.neutral()
    with pytest.raises(ValueError, match="all parts have strength 0"):
        total.neutral().with_strength(1.0)
    assert MAS(0.1).with_strength(2.0) == MAS(2.0)
