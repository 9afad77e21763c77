"""What a keeper prepares once a task: steps that are alike give what the formulas give, and a change of anything is noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import MAS, SLNID, functional
from selfless.functional import Anchor
from selfless.keeper.anchor import Pull
from selfless.keeper.roster import Roster


def make(widths: tuple[int, ...]) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, now in zip((6, *widths), widths, strict=False):
        layers += [nn.Linear(before, now), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 3)).double()


def slow_penalty(model: nn.Sequential, keeper: Any, x: Tensor, strength: float) -> Tensor:
    """λ Σ_l R by the formula, layer by layer."""
    total, h = torch.zeros((), dtype=x.dtype), x
    for name, module in model.named_children():
        h = module(h)
        if isinstance(module, nn.ReLU):
            total = total + strength * functional.slnid(h, keeper.alpha.get(name), sigma=h.shape[1] / 6)
    return total


@pytest.mark.parametrize("widths", [(12, 12), (8, 12, 12), (200, 200)], ids=str)
def test_every_step_of_a_loop_has_the_penalty_of_the_formula(widths: tuple[int, ...]) -> None:
    """Dense and factored S, one shape of layers or two; other batches, eval passes and a new task in between."""
    model, plain = make(widths), make(widths)
    keeper = selfless.attach(model, MAS(0.1), SLNID(0.1), layers=[n for n, m in model.named_children() if isinstance(m, nn.ReLU)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    keeper.anchor_with(optimizer)
    g = torch.Generator().manual_seed(1)
    for size in (10, 10, 10, 7, 7, 10):
        x, y = torch.randn(size, 6, generator=g, dtype=torch.float64), torch.randint(3, (size,), generator=g)
        plain.load_state_dict(model.state_dict())
        want = slow_penalty(plain, keeper, x, 0.1)
        wanted = torch.autograd.grad(want, list(plain.parameters()), allow_unused=True)
        output = model(x)
        with torch.no_grad():
            model(x)
        penalty = keeper.penalty()
        assert_close(penalty, want)
        wanted = [None if g is None else 0.25 * g for g in wanted]
        found = torch.autograd.grad(0.25 * penalty, list(model.parameters()), retain_graph=True, allow_unused=True)
        for a, b in zip(found, wanted, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_close(a, b)
        assert keeper.log()["inhibition"] == pytest.approx(want.item())
        optimizer.zero_grad()
        (F.cross_entropy(output, y) + penalty).backward()
        optimizer.step()
        if size == 7:
            keeper.consolidate([(x, y)])


@pytest.mark.parametrize("widths", [(12, 12), (8, 12), (200,)], ids=str)
@pytest.mark.parametrize("check", [False, True])
def test_every_injected_step_of_a_loop_has_the_gradient_of_the_formula(widths: tuple[int, ...], check: bool) -> None:
    """Dense and factored S; other batches, another scale, two forward passes, passes without gradients and a new task in between."""
    model, plain = make(widths), make(widths)
    layers = [n for n, m in model.named_children() if isinstance(m, nn.ReLU)]
    keeper = selfless.attach(model, MAS(0.1), SLNID(0.1), layers=layers, inject=True, check_finite=check)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    keeper.anchor_with(optimizer)
    g = torch.Generator().manual_seed(1)
    for size, passes, scale in (
        (10, 1, 1.0),
        (10, 1, 1.0),
        (10, 1, 0.25),
        (7, 1, 1),
        (7, 1, 1.0),
        (10, 2, 1.0),
        (10, 1, 1.0),
        (10, 1, 1.0),
    ):
        x, y = torch.randn(size, 6, generator=g, dtype=torch.float64), torch.randint(3, (size,), generator=g)
        plain.load_state_dict(model.state_dict())
        want = slow_penalty(plain, keeper, x, 0.1)
        (F.cross_entropy(plain(x), y) * passes + want).mul(scale).backward()
        keeper.scale = scale
        loss = sum(F.cross_entropy(model(x), y) for _ in range(passes))
        with torch.no_grad():
            model(x)
        optimizer.zero_grad()
        torch.as_tensor(loss).mul(scale).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(p.grad, q.grad)
            q.grad = None
        found = keeper.log()
        assert found["inhibition"] == pytest.approx(want.item())
        assert sum(found[f"inhibition/{layer}"] for layer in layers) == pytest.approx(want.item())
        optimizer.step()
        if size == 7:
            keeper.consolidate([(x, y)])


def injecting(widths: tuple[int, ...] = (12, 12), check: bool = True) -> tuple[nn.Sequential, Any, Any]:
    """A model whose keeper injects, after two ordinary steps."""
    model, (x, y) = make(widths), (torch.randn(9, 6, dtype=torch.float64), torch.zeros(9, dtype=torch.int64))
    keeper = selfless.attach(model, MAS(0.5), SLNID(0.1), layers=["1", "3"][: len(widths)], inject=True, check_finite=check)
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()
    return model, keeper, (x, y)


def test_a_new_parameter_is_anchored_even_after_a_pass_without_a_backward_pass() -> None:
    found = []
    for inject in (True, False):
        model, (x, y) = (
            make((12, 12)),
            (torch.randn(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)), torch.arange(9) % 3),
        )
        keeper = selfless.attach(model, MAS(5.0), SLNID(0.1), layers=["1", "3"], inject=inject)
        keeper.consolidate([(x, y)])
        for number in range(3):
            if number == 2:
                model(x)
                model[4] = nn.Linear(12, 3).double()
            loss = F.cross_entropy(model(x), y)
            (loss if inject else loss + keeper.penalty()).backward()
        found.append(model[4].weight.grad)
    assert_close(*found)


def test_a_batch_that_is_not_finite_is_no_part_of_the_next_one() -> None:
    model, keeper, (x, y) = injecting((12,))
    with pytest.raises(ValueError, match="NaN or infinite activations"):
        F.cross_entropy(model(x * torch.nan), y).backward()
    F.cross_entropy(model(x), y).backward()
    assert keeper.log()["inhibition"] == pytest.approx(slow_penalty(model, keeper, x, 0.1).item())


def test_the_log_of_an_injected_step_can_be_read_later() -> None:
    model, keeper, (x, y) = injecting(check=False)
    F.cross_entropy(model(x), y).backward()
    want = slow_penalty(model, keeper, x, 0.1).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert keeper.log()["inhibition"] == pytest.approx(want)


def test_a_prepared_penalty_can_be_differentiated_twice() -> None:
    model = make((12, 12))
    keeper, x = selfless.attach(model, None, SLNID(0.1)), torch.randn(9, 6, dtype=torch.float64)
    seconds = []
    for penalty in (lambda: keeper.penalty(), lambda: keeper.penalty(), lambda: slow_penalty(model, keeper, x, 0.1)):
        model(x)
        (first,) = torch.autograd.grad(penalty(), [model[0].weight], create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), [model[0].weight])[0])
        for p in model.parameters():
            p.grad = None
        with torch.no_grad():
            keeper.log()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert_close(seconds[0], seconds[2])
    assert_close(seconds[1], seconds[2])


def test_the_prepared_anchor_is_that_of_the_formula_when_anything_changes() -> None:
    """A learning rate, the optimizer, the data of a parameter, a parameter itself: θ' = (θ + cΩθ*)/(1 + cΩ) each time.

    A parameter that is frozen later stays where it is.
    """
    model = make((8, 8))
    keeper, data = selfless.attach(model, MAS(0.5)), [(torch.randn(9, 6, dtype=torch.float64), torch.zeros(9, dtype=torch.int64))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper.anchor_with(optimizer).consolidate(data)
    for change in ("none", "none", "rate", "optimizer", "data", "parameter", "none", "frozen"):
        if change == "rate":
            optimizer.param_groups[0]["lr"] = 0.03
        if change == "data":
            model[0].weight.data = model[0].weight.data.clone()
        if change == "parameter":
            model[2].weight = nn.Parameter(model[2].weight.detach().clone())
        if change in ("optimizer", "parameter"):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        optimizer.zero_grad()
        F.cross_entropy(model(data[0][0]), data[0][1]).backward()
        rate, state = optimizer.param_groups[0]["lr"], keeper.state
        want = {}
        if change == "frozen":
            model[0].bias.requires_grad_(False).add_(0.1)
            model[0].bias.grad = None
        for name, p in model.named_parameters():
            if not p.requires_grad:
                want[name] = p.detach().clone()
                continue
            assert p.grad is not None
            c = 2 * rate * 0.5 * state["omega"][name]
            want[name] = (p.detach() - rate * p.grad + c * state["anchor"][name]) / (1 + c)
        optimizer.step()
        for name, p in model.named_parameters():
            assert_close(p.detach(), want[name], msg=f"{change}: {name}")


def test_a_roster_follows_its_model() -> None:
    model = make((8,))
    roster = Roster(model)
    known = roster.follow().trainable
    assert roster.follow().trainable is known
    for change in (
        lambda: model[0].weight.requires_grad_(False),
        lambda: model.append(nn.Linear(3, 2)),
        lambda: setattr(model[0], "bias", None),
        lambda: setattr(model[2], "weight", nn.Parameter(torch.zeros(3, 8))),
        lambda: setattr(model, "2", nn.Linear(8, 3)),
        lambda: model[2].register_parameter("more", nn.Parameter(torch.zeros(1))),
    ):
        change()
        now = {n: p for n, p in model.named_parameters() if p.requires_grad}
        found = roster.follow()
        assert list(found.trainable) == list(now)
        assert all(found.trainable[n] is p for n, p in now.items())
        assert {found.names[p] for p in now.values()} == set(now)
    assert roster.has(torch.optim.SGD([model[2].weight], lr=0.1))
    assert not roster.has(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))


def test_a_prepared_penalty_notices_a_new_alpha_and_frozen_layers() -> None:
    model, plain = make((12, 12)), make((12, 12))
    keeper, x = selfless.attach(model, None, SLNID(0.1), layers=["1", "3"]), torch.randn(9, 6, dtype=torch.float64)
    keeper.consolidate([(x, torch.zeros(9, dtype=torch.int64))])
    for change in ("none", "none", "alpha", "none", "frozen"):
        if change == "alpha":
            keeper.alpha["1"] = torch.linspace(0, 3, 12, dtype=torch.float64)
        if change == "frozen":
            model[:4].requires_grad_(False)
        want = slow_penalty(plain, keeper, x, 0.1)
        model(x)
        penalty = keeper.penalty()
        assert_close(penalty.detach(), want.detach(), msg=change)
        penalty.backward()  # also if no activation has a gradient
        torch.optim.SGD(model.parameters(), lr=0.0).step()


def pulled(*kinds: str) -> list[Tensor]:
    """Return an embedding, a weight and a bias, divided by θ*, after some steps of the implicit anchor.

    A kind of step: "none" without any gradient, "sparse" and "dense" with gradients 0 of two rows or all, "swap" with the other layer in
    the optimizer, "drift" as "dense" after a move of all rows; "Adam" first makes one. Steps begin 1 away from θ*, before "sparse" at θ*.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3)).double()
    keeper = selfless.attach(model, MAS(1.0))
    keeper.consolidate([(torch.arange(6), torch.arange(6) % 3)])
    named = dict(model.named_parameters())
    optimizer: torch.optim.Optimizer = torch.optim.SGD([model[0].weight] if "swap" in kinds else model.parameters(), lr=0.1)
    with torch.no_grad():
        for p in named.values() if kinds[0] != "sparse" else ():
            p.add_(1.0)
    for kind in kinds:
        if kind == "Adam":
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            continue
        if kind == "swap":
            optimizer.param_groups[0]["params"] = [model[1].weight]
        keeper.anchor_with(optimizer)
        for p in named.values():
            p.grad = None if kind == "none" else torch.zeros_like(p)
        if kind == "sparse":
            model[0].weight.grad = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.zeros(2, 4).double(), (6, 4))
        if kind == "drift":
            model[0].weight.data.add_(1.0)
        optimizer.step()
    return [p.detach() / keeper.state["anchor"][n] for n, p in named.items()]


def test_a_prepared_anchor_notices_what_an_optimizer_gets_later() -> None:
    """Adam has a second moment from the first gradient on: with v = 0 the pull is total."""
    for found in pulled("Adam", "none", "dense"):
        assert_close(found, torch.ones_like(found), atol=1e-3, rtol=0.0)


def test_a_prepared_anchor_notices_other_parameters_in_a_group() -> None:
    embedding, weight, bias = pulled("dense", "swap")
    once = pulled("dense")
    assert_close(embedding, once[0])
    assert_close(weight, once[1])
    assert not torch.allclose(bias, once[2])  # it is in no group


def test_rows_that_dense_steps_change_are_pulled_by_sparse_ones() -> None:
    assert_close(pulled("sparse", "drift", "sparse")[0], pulled("sparse", "drift", "dense")[0])


def test_each_of_two_optimizers_keeps_what_was_prepared() -> None:
    model, pull = make((8,)), Pull()
    names = {p: n for n, p in model.named_parameters()}
    anchor = Anchor({n: torch.ones_like(p) for p, n in names.items()}, {n: torch.zeros_like(p) for p, n in names.items()})
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    for turn in range(3):
        for optimizer in optimizers:
            assert pull.is_ready(optimizer, names, anchor) == (turn > 0)
            with torch.no_grad():
                pull(optimizer, names, anchor, 0.5)
