"""The implicit anchor: stable at any strength, equal to the penalty for small steps, whatever the optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import MAS
from selfless.keeper.anchor import step_sizes
from selfless.keeper.damping import Optimizers
from tests.keeper.nets import batches, seeded, train

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


@pytest.mark.parametrize(
    ("optimizer", "strength"),
    [(name, strength) for i, name in enumerate(OPTIMIZERS) for strength in (0.0, (1e-6, 1.0, 1e4)[i % 3], 1e12)],
)
def test_implicit_anchor_is_stable_at_any_strength(optimizer: str, strength: float) -> None:
    model = seeded()
    keeper = selfless.attach(model, MAS(strength), layers=["fc1"])
    opt = OPTIMIZERS[optimizer](model.parameters())
    keeper.anchor_with(opt)
    train(model, keeper, opt, batches())
    keeper.consolidate(batches())
    anchor = {n: p.detach().clone() for n, p in model.named_parameters()}
    omega = {n: t.clone() for n, t in keeper.state["omega"].items()}
    train(model, keeper, opt, batches(1), epochs=5)
    for name, p in model.named_parameters():
        assert torch.isfinite(p).all()
        moved = (p.detach() - anchor[name]).abs()
        if strength == 1e12:  # everything that matters at all is held where it was
            assert moved[omega[name] > 1e-4].max() < 1e-4
    if strength == 0.0:
        assert max((p.detach() - anchor[n]).abs().max() for n, p in model.named_parameters()) > 1e-3


def test_explicit_anchor_diverges_where_the_implicit_one_does_not() -> None:
    finite = []
    for implicit in (True, False):
        model = seeded()
        keeper = selfless.attach(model, MAS(1e4), layers=["fc1"], check_finite=False)
        opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if implicit:
            keeper.anchor_with(opt)
        train(model, keeper, opt, batches())
        keeper.consolidate(batches())
        train(model, keeper, opt, batches(1), epochs=10)
        finite.append(all(bool(torch.isfinite(p).all()) for p in model.parameters()))
    assert finite == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "adam", "adamw"])
def test_implicit_agrees_with_explicit_for_small_steps(optimizer: str) -> None:
    """As lr·λ·Ω → 0 the implicit anchor pulls as hard as the explicit penalty does, whatever the optimizer.

    A thousand parameters under the same zero-mean gradient noise (which is what Adam's second moment then measures), anchored at 0,
    starting from 1: the pull is the mean distance that the penalty adds to their way.
    """

    class Points(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1000, dtype=torch.float64))

    def mean_end(mode: str, strength: float) -> float:
        model, noise = Points(), torch.Generator().manual_seed(0)
        keeper = selfless.attach(model, MAS(strength))
        keeper.state, keeper.tasks = {"omega": {"w": torch.ones(1000)}, "anchor": {"w": torch.zeros(1000)}}, 1
        keeper.state = {group: {"w": t["w"].double()} for group, t in keeper.state.items()}
        opt = OPTIMIZERS[optimizer](model.parameters())
        for group in opt.param_groups:
            group["lr"], group["weight_decay"] = 1e-3, 0.0
        if mode == "implicit":
            keeper.anchor_with(opt)
        for _ in range(400):
            loss = (model.w * torch.randn(1000, generator=noise, dtype=torch.float64)).sum() + keeper.penalty()
            opt.zero_grad()
            loss.backward()
            opt.step()
        return float(model.w.detach().mean())

    free = mean_end("explicit", 0.0)
    explicit, implicit = free - mean_end("explicit", 0.02), free - mean_end("implicit", 0.02)
    assert explicit > 1e-3
    assert implicit == pytest.approx(explicit, rel=0.06)


def test_schedulers_and_groups_are_read_at_every_step() -> None:
    model = seeded()
    keeper = selfless.attach(model, MAS(1.0), layers=["fc1"])
    keeper.consolidate(batches())
    opt = torch.optim.SGD(
        [{"params": [model.fc1.weight], "lr": 0.2}, {"params": [model.fc2.weight], "lr": 0.0}, {"params": [model.head.bias]}], lr=0.1
    )
    keeper.anchor_with(opt)
    before = {n: p.detach().clone() + 0.1 for n, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    opt.step()
    pull = 2 * 0.2 * keeper.state["omega"]["fc1.weight"]
    assert_close(model.fc1.weight.detach(), (before["fc1.weight"] + pull * (before["fc1.weight"] - 0.1)) / (1 + pull))
    assert_close(model.fc2.weight.detach(), before["fc2.weight"])
    assert_close(model.head.weight.detach(), before["head.weight"])  # in no optimizer: nothing moves it, nothing pulls it
    opt.param_groups[0]["lr"] = 0.0
    held = model.fc1.weight.detach().clone()
    opt.step()
    assert_close(model.fc1.weight.detach(), held)


MORE = {
    "dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3),
    "rmsprop with momentum": lambda p: torch.optim.RMSprop(p, lr=0.001, alpha=0.9, momentum=0.8),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.99), amsgrad=True),
    "a tensor as rate": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.05)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS | MORE)
def test_a_step_size_is_how_far_a_constant_gradient_of_one_moves_a_parameter(optimizer: str) -> None:
    """After a larger first gradient, which the optimizers forget except amsgrad and Adagrad; the law is that of the module's table."""
    p, q = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64)), nn.Parameter(torch.zeros(1))
    opt = (OPTIMIZERS | MORE)[optimizer]([p, q])
    opt.param_groups[0]["weight_decay"] = 0.0
    for step in range(150):
        before = p.detach().clone()
        p.grad = torch.full_like(p, 30.0 if step == 0 else 1.0)
        opt.step()
    sizes = step_sizes(opt, {p: "p"})
    assert sizes.keys() == {"p"}
    assert_close(torch.as_tensor(sizes["p"], dtype=torch.float64).expand_as(p), before - p.detach(), rtol=1e-4, atol=0.0)


def test_the_step_size_for_damping_is_the_rate_over_one_minus_momentum() -> None:
    p, q, rest = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    named, known = {"p": p, "q": q, "rest": rest}, Optimizers()
    assert known.nominal_steps(named) == (None, {})
    sgd, adam = torch.optim.SGD([p], lr=0.1, momentum=0.75), torch.optim.Adam([p], lr=0.1, betas=(0.8, 0.9))
    known.note(sgd, True)
    assert known.nominal_steps(named) == (pytest.approx(0.4), {"p": 1.0})
    known.note(adam, True)
    assert known.nominal_steps(named) == (pytest.approx(0.5), {"p": 1.0})  # the later one
    two = torch.optim.SGD([{"params": [p], "lr": 0.1}, {"params": [q], "lr": 0.4}], lr=1.0)
    known.note(two, True)
    assert known.nominal_steps(named) == (pytest.approx(0.4), {"p": pytest.approx(0.25), "q": 1.0})
    assert (known.of_others(adam), known.of_others(two)) == ({id(p), id(q)}, {id(p)})
    third = torch.optim.SGD([rest], lr=0.3)
    known.note(third, True)
    known.end_task()
    assert known.nominal_steps(named) == (pytest.approx(0.3), {"rest": 1.0})  # until one takes a step in the new task
    known.note(sgd, True)
    assert known.nominal_steps(named) == (pytest.approx(0.4), {"p": 1.0})
    known.note(third, False)
    assert known.nominal_steps(named) == (None, {})


def pulled_from_one_above(model: nn.Module, keeper: selfless.Keeper) -> Tensor:
    """Put fc1.weight one above θ* and take a step at rate 0.1 without a gradient; return θ*."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper.anchor_with(optimizer)
    weight = model.get_parameter("fc1.weight")
    star = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1.0)
    optimizer.step()
    return star


def test_importances_in_bfloat16_anchor_a_model_that_has_become_narrower() -> None:
    """θ* is in float64; Ω and the parameters are in float32 when they are used."""
    model = seeded().double()
    keeper = selfless.attach(model, MAS(1.0), state_dtype=torch.bfloat16)
    keeper.consolidate([(x.double(), y) for x, y in batches()])
    model.float()
    star = pulled_from_one_above(model, keeper)
    share = 0.2 * keeper.state["omega"]["fc1.weight"].float()
    assert_close(model.fc1.weight.detach(), star + 1 / (1 + share), rtol=1e-5, atol=1e-6)


def test_a_model_that_changes_its_precision_between_tasks_is_still_anchored() -> None:
    """Ω of the first task stays in float64, θ* of the second is in float32."""
    model = seeded().double()
    keeper = selfless.attach(model, MAS(1.0))
    keeper.consolidate([(x.double(), y) for x, y in batches()])
    model.float()
    keeper.consolidate(batches(1))
    star = pulled_from_one_above(model, keeper)
    share = 0.2 * keeper.state["omega"]["fc1.weight"].double()
    assert_close(model.fc1.weight.detach().double(), star.double() + 1 / (1 + share), rtol=1e-5, atol=1e-6)
