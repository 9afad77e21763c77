"""keeper.log(): each part of a step as a float."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

import selfless
from selfless import EWC, HAT, MAS, SLNID, SNI, L2Param, LwF, functional
from selfless.preserve import Group, Preserver
from tests.keeper.nets import batches, seeded, sequential, train


def step(model: Any, keeper: Any, data: Any) -> float:
    x, y = data
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    cost = keeper.penalty((x, y)) if keeper.injector is None else torch.zeros(())
    (loss + cost).backward()
    return cost.item()


@pytest.mark.parametrize("inject", [False, True])
def test_the_parts_of_a_step(inject: bool) -> None:
    model, (x, y) = seeded(), batches()[0]
    keeper = selfless.attach(model, MAS(2.0), SNI(0.5), inject=inject)
    step(model, keeper, (x, y))
    h1 = torch.relu(model.fc1(x)).detach()
    h2 = torch.relu(model.fc2(h1)).detach()
    want = {"inhibition/fc1": 0.5 * functional.sni(h1).item(), "inhibition/fc2": 0.5 * functional.sni(h2).item(), "tasks": 0.0}
    want |= {"active/fc1": (h1 > 0).float().mean().item(), "active/fc2": (h2 > 0).float().mean().item()}
    want |= {
        "inhibition": want["inhibition/fc1"] + want["inhibition/fc2"],
        "active": (want["active/fc1"] + want["active/fc2"]) / 2,
    }
    assert keeper.log() == pytest.approx(want, rel=1e-4)
    assert all(type(value) is float for value in keeper.log().values())


@pytest.mark.parametrize("implicit", [False, True])
def test_the_anchor_and_the_drift(implicit: bool) -> None:
    """The implicit anchor is logged as the penalty that it stands for."""
    model = seeded()
    keeper = selfless.attach(model, EWC(2.0) + MAS(1.0) if not implicit else EWC(2.0))
    if implicit:
        keeper.anchor_with(torch.optim.SGD(model.parameters(), lr=0.1))
    keeper.consolidate(batches())
    star = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    omega = keeper.states[-1]["omega"]
    strength = 2.0 if implicit else 1.0
    want = strength * sum((omega[n] * (p.detach() - star[n]).square()).sum().item() for n, p in model.named_parameters())
    drift = sum((p.detach() - star[n]).square().sum().item() for n, p in model.named_parameters()) ** 0.5
    size = sum(t.square().sum().item() for t in star.values()) ** 0.5
    found = keeper.log()
    assert found["drift"] == pytest.approx(drift, rel=1e-4)
    assert found["drift/relative"] == pytest.approx(drift / size, rel=1e-4)
    if implicit:
        assert found["anchor"] == pytest.approx(want, rel=1e-4)
    else:  # two anchors add up
        assert found["anchor"] == pytest.approx(step(model, keeper, batches()[0]), rel=1e-3)
    free = keeper.capacity()
    assert found["free/parameters"] == free.free_parameters
    assert found["free/neurons"] == free.free_neurons


@pytest.mark.filterwarnings("ignore:.* has changed since task")  # weights are moved by hand
def test_the_parts_add_up_to_the_penalty() -> None:
    model = seeded()
    keeper = selfless.attach(model, LwF(1.0), SLNID(0.1) + L2Param(0.01))
    train(model, keeper, torch.optim.SGD(model.parameters(), lr=0.1), batches(), epochs=1)
    keeper.consolidate(batches())
    with torch.no_grad():
        model.head.weight.mul_(8.0)
    total = step(model, keeper, batches(1)[0])
    found = keeper.log()
    assert found["distillation"] > 1e-3
    assert found["inhibition"] + found["distillation"] == pytest.approx(total, rel=1e-4)


@dataclass(frozen=True)
class Near(Preserver):
    """A penalty on θ that is no quadratic one: |θ − θ*|."""

    name: ClassVar[str] = "near"
    groups: ClassVar[tuple[Group, ...]] = (Group("anchor"),)
    strength: float = 1.0

    def penalty(self, state: Any, parameters: Any) -> Any:
        return sum((p - state["anchor"][n]).abs().sum() for n, p in parameters.items())

    def consolidate(self, state: Any, parameters: Any, omega: Any) -> Any:
        return {"anchor": {n: p.detach().clone() for n, p in parameters.items()}}


@pytest.mark.parametrize("inject", [False, True])
def test_any_other_penalty_on_parameters(inject: bool) -> None:
    model = seeded()
    keeper = selfless.attach(model, Near(0.5), inject=inject)
    keeper.consolidate(batches())
    with torch.no_grad():
        model.fc1.bias.add_(0.1)
    step(model, keeper, batches()[0])
    assert keeper.log()["penalty"] == pytest.approx(0.5 * 16 * 0.1, rel=1e-4)


def test_gates_and_nothing_yet() -> None:
    model = seeded(sequential)
    keeper = selfless.attach(model, HAT(0.75))
    assert keeper.log() == {"tasks": 0.0}
    keeper.begin_epoch(0, 1, batches=1)
    assert keeper.log().keys() == {"tasks"}
    assert step(model, keeper, batches()[0]) == pytest.approx(keeper.log()["gates"])
    model.eval()
    assert step(model, keeper, batches()[0]) == 0.0  # gates are trained in training mode alone
