"""Strength "auto" in a loop: what is measured, when it stays, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import selfless
from selfless import EWC, HAT, IMM, MAS, SI, SLNI, SLNID, SNI, SNID, DeCov, L1Rep, LwF, PackNet, RWalk
from selfless.functional import scale as scales
from selfless.preserve import PRESERVERS
from selfless.sparsify import SPARSIFIERS
from selfless.terms import parse
from tests.keeper.nets import batches, seeded, sequential, train


@pytest.fixture(autouse=True)
def _early_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """R may settle after three steps: the tasks of these tests are short."""
    monkeypatch.setattr(scales, "FIRST_LOOK", 2.0)


def learn(preserve: Any = None, sparsify: Any = None, model: nn.Module | None = None, epochs: int = 3) -> tuple[nn.Module, selfless.Keeper]:
    model = seeded(sequential) if model is None else model
    keeper = selfless.attach(model, preserve, sparsify)
    train(model, keeper, torch.optim.SGD(model.parameters(), lr=0.05), batches(), epochs)
    return model, keeper


def copied(model: nn.Module) -> nn.Module:
    other = seeded(sequential)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("term", [SNI, SNID, SLNI, SLNID])
def test_inhibition_is_measured_in_the_first_task_and_then_stays(term: Any) -> None:
    _, keeper = learn(sparsify=term("auto"))
    found = keeper.strengths[term.name]
    assert found is not None
    assert found > 0
    keeper.consolidate(batches())
    after = keeper.strengths[term.name]
    train(keeper.model, keeper, torch.optim.SGD(keeper.model.parameters(), lr=0.05), batches(1))
    assert keeper.strengths[term.name] == after
    assert f"{term.name}: {after:.3g}" in repr(keeper)


@pytest.mark.filterwarnings("ignore:.* has changed since task")  # weights are moved by hand
def test_the_measured_strength_is_the_same_penalty_as_the_number() -> None:
    """With λ measured, the penalty is that of a keeper with this number."""
    model, keeper = learn(MAS("auto"), SLNID("auto"))
    keeper.consolidate(batches())
    numbers: Any = keeper.strengths
    fixed = selfless.attach(copied(model), MAS(numbers["mas"]), SLNID(numbers["slnid"]))
    fixed.alpha, fixed.state, fixed.tasks = keeper.alpha, keeper.state, 1
    for one in (keeper, fixed):
        with torch.no_grad():
            for p in one.model.parameters():
                p.add_(0.01)
        one.model(batches()[0][0])
    assert_close(keeper.penalty(), fixed.penalty())
    assert keeper.log() == pytest.approx(fixed.log())


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_the_unit_of_activations_does_not_matter(factor: float) -> None:
    """h → c·h, with the next layer divided by c, is the same function: λ → λ/c², and λR stays."""
    plain, scaled = seeded(sequential), seeded(sequential)
    with torch.no_grad():
        for layer in (scaled[0], scaled[2]):
            layer.bias.mul_(factor)
        scaled[0].weight.mul_(factor)
        scaled[4].weight.div_(factor)
    found = []
    for model in (plain, scaled):
        keeper = selfless.attach(model, sparsify=SLNID("auto"))
        for x, _ in batches():
            model(x)
            penalty = keeper.penalty()
        found.append((keeper.strengths["slnid"], float(penalty.detach())))
    assert found[1][0] == pytest.approx(found[0][0] / factor**2, rel=1e-3)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-3)
    assert found[0][1] > 0


@pytest.mark.filterwarnings("ignore:.* has changed since task")  # weights are moved by hand
@pytest.mark.parametrize("term", [MAS, EWC, SI, RWalk])
def test_the_anchor_costs_its_share_at_zero(term: Any) -> None:
    model, keeper = learn(term("auto"))
    assert keeper.strengths[term.name] is None
    assert "not yet measured" in repr(keeper)
    keeper.consolidate(batches())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert float(keeper.penalty().detach()) == pytest.approx(term.auto_share, rel=1e-4)


def test_a_keeper_that_was_loaded_goes_on_as_before() -> None:
    for epochs, tasks in ((1, 0), (2, 1)):
        model, keeper = learn(MAS("auto"), SLNID("auto"), epochs=epochs)
        for _ in range(tasks):
            keeper.consolidate(batches())
        loaded = selfless.attach(copied(model), MAS("auto"), SLNID("auto"))
        loaded.load_state_dict(keeper.state_dict())
        assert loaded.strengths == keeper.strengths
        for _ in range(3):
            found = []
            for one in (keeper, loaded):
                one.model(batches()[0][0])
                found.append(one.penalty())
            assert_close(*found)
        keeper.consolidate(batches())
        loaded.consolidate(batches())
        assert loaded.strengths == keeper.strengths


def test_a_state_with_numbers_is_not_loaded_as_auto() -> None:
    model, keeper = learn(MAS(0.1), SLNID(1e-3))
    keeper.consolidate(batches())
    with pytest.raises(ValueError, match="attach with that number"):
        selfless.attach(copied(model), MAS("auto"), SLNID(1e-3)).load_state_dict(keeper.state_dict())
    with pytest.raises(ValueError, match="attach with that number"):
        selfless.attach(copied(model), MAS(0.1), SLNID("auto")).load_state_dict(keeper.state_dict())


def test_a_state_of_the_first_task_with_numbers_is_loaded_as_auto() -> None:
    """Nothing has been measured yet, so there is nothing that could be missing."""
    keeper = selfless.attach(seeded(sequential), None, SNI("auto"))
    keeper.load_state_dict(selfless.attach(seeded(sequential), None, SNI(1e-3)).state_dict())
    assert keeper.strengths == {"sni": None}
    train(keeper.model, keeper, torch.optim.SGD(keeper.model.parameters(), lr=0.05), batches())
    keeper.consolidate(batches())
    assert keeper.strengths["sni"] == learn(None, SNI("auto"))[1].strengths["sni"]


def test_without_a_positive_term_there_is_a_warning() -> None:
    _, keeper = learn(sparsify=SLNID("auto"), epochs=0)
    with pytest.warns(UserWarning, match="found no positive R"):
        keeper.consolidate(batches())


@pytest.mark.parametrize(("kind", "reason"), [(PackNet, "share of weights"), (HAT, "gates"), (IMM, "Ω = 1"), (DeCov, "no scale")])
def test_a_method_without_a_scale_refuses(kind: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"{reason}.*; write a number, as {kind.__name__}\("):
        kind("auto")


def test_injected_gradients_refuse_a_sparsifier_that_is_measured() -> None:
    with pytest.raises(ValueError, match="slnid:auto, because it sees one layer at a time; write a number"):
        selfless.attach(seeded(sequential), MAS("auto"), SLNID("auto"), inject=True)
    assert selfless.attach(seeded(sequential), MAS("auto"), SLNID(1e-3), inject=True).strengths == {"mas": None, "slnid": 1e-3}


@pytest.mark.parametrize("storage", [{"state_dtype": torch.bfloat16}, {"state_device": "cpu"}], ids=str)
def test_a_stored_state_is_measured(storage: dict[str, Any]) -> None:
    _, plain = learn(MAS("auto"))
    model = seeded(sequential)
    small = selfless.attach(model, MAS("auto"), **storage)
    train(model, small, torch.optim.SGD(model.parameters(), lr=0.05), batches(), 3)
    for keeper in (plain, small):
        keeper.consolidate(batches())
    assert small.strengths["mas"] == pytest.approx(plain.strengths["mas"], rel=1e-2)


def test_the_strengths_of_a_sum_with_auto() -> None:
    term: Any = SLNID("auto") + L1Rep(1e-5)
    assert term.neutral() == SLNID("auto") + L1Rep(0.0)
    with pytest.raises(ValueError, match="has no ratio"):
        term.with_strength(1e-3)


def test_negative_activations_are_named_with_auto() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    keeper = selfless.attach(model, sparsify=SLNID("auto"))
    model(batches()[0][0])
    with pytest.warns(UserWarning, match=r'write SLNID\("auto", absolute=True\)'):
        keeper.penalty()


def test_distillation_has_the_unit_of_the_loss() -> None:
    assert LwF("auto") == LwF(1.0)


def test_auto_has_a_text_form() -> None:
    for text in ("slnid:auto", "slnid:auto,sigma=4", "slnid:auto+l1-rep:1e-05"):
        assert str(parse(text, SPARSIFIERS, "sparsifier")) == text
    assert parse("mas:auto", PRESERVERS, "preserver") == MAS("auto")
    assert (SLNID("auto") + L1Rep(1e-5)).is_on
    with pytest.raises(TypeError, match="number or 'auto'"):
        MAS("automatic")  # type: ignore[arg-type]
    run = selfless.Run(preserve="mas:auto", sparsify="slnid:auto")
    assert selfless.Run.from_dict(run.as_dict()) == run
    assert run.key != selfless.Run(preserve="mas:0.1", sparsify="slnid:1e-3").key
