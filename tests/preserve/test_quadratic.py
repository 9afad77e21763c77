"""Local MAS and online EWC against obvious references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import EWC, LocalMAS, OnlineEWC
from tests import oracles
from tests.preserve.heads import NAMES, Heads, Small, data


def test_local_mas_is_hebbs_rule() -> None:
    model = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    batches = [torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    keeper = selfless.attach(model, LocalMAS(1.0))
    keeper.consolidate(batches)
    linear: list[Any] = [model[0], model[2], model[4]]
    want = oracles.hebbian([m.weight.detach() for m in linear], [m.bias.detach() for m in linear], torch.cat(batches))
    for k, (weight, bias) in zip((0, 2, 4), want, strict=True):
        assert_close(keeper.state["omega"][f"{k}.weight"], weight)
        assert_close(keeper.state["omega"][f"{k}.bias"], bias)
    plain = selfless.importance.mas(model, batches)
    assert not torch.allclose(plain["0.weight"], keeper.state["omega"]["0.weight"], rtol=0.1)  # it is another measure
    assert_close(plain["4.weight"], keeper.state["omega"]["4.weight"])  # of the last layer it is the same


def test_local_mas_calls_the_model_as_the_loop_does() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Heads().double()
    x = torch.randn(5, 6, dtype=torch.float64)
    keeper = selfless.attach(model, LocalMAS(1.0), heads=NAMES)
    keeper.consolidate([x], forward=lambda m, x: m(x, 1))
    omega = keeper.state["omega"]
    assert float(omega["heads.0.weight"].max()) == float(omega["heads.2.weight"].max()) == 0.0
    body = model.body(x).detach()
    want = torch.stack([(2 * model.heads[1](h)[:, None] * h).abs().detach() for h in body]).mean(0)
    assert_close(omega["heads.1.weight"], want)


def test_local_mas_with_activations_as_functions_and_convolutions() -> None:
    torch.manual_seed(0)
    model, x = Small().double(), torch.randn(5, 1, 4, 4, dtype=torch.float64)
    keeper = selfless.attach(model, LocalMAS(1.0))
    keeper.consolidate([x])
    total: Tensor = torch.zeros_like(model.conv.weight)
    for one in x:  # ∂‖relu(conv(x))‖²/∂kernel, a sample at a time
        total += torch.autograd.grad(F.relu(model.conv(one[None])).square().sum(), model.conv.weight)[0].abs()
    assert_close(keeper.state["omega"]["conv.weight"], total / len(x))
    other = nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="use MAS there"):
        selfless.attach(other, LocalMAS(), layers=["1"]).consolidate([torch.randn(3, 4)])


def test_local_mas_names_a_layer_whose_rows_are_not_samples() -> None:
    """Two graphs of three nodes: the first layer has a row for each node, the output one for each graph."""

    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nodes = torch.relu(self.body(x.flatten(0, 1)))
            return self.head(nodes.unflatten(0, (-1, 3)).mean(1))

    with pytest.raises(ValueError, match="'body' has 6 for 2, as the nodes of graphs: use MAS there"):
        selfless.attach(Graphs(), LocalMAS()).consolidate([torch.randn(2, 3, 4)])


@pytest.mark.parametrize(("preserve", "d"), [(OnlineEWC(5.0), 0.9), (OnlineEWC(5.0, decay=0.5), 0.5), (EWC(5.0), 1.0)], ids=str)
def test_online_ewc_fades_what_was_important(preserve: EWC, d: float) -> None:
    """After three tasks Ω = d(dΩ₁ + Ω₂) + Ω₃, each Ω by a loop over the samples; the anchor is the last task's θ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    keeper, found = selfless.attach(model, preserve), []
    for t in range(3):
        batches, opt = [(x.double(), y) for x, y in data(t, 3, 6)], torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches:
            opt.zero_grad()
            (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
            opt.step()
        found.append(oracles.omega(model, batches, oracles.log_likelihood, 2))
        model.train()
        keeper.consolidate(batches)
    first, second, third = found
    for n, p in model.named_parameters():
        assert_close(keeper.state["omega"][n], d * (d * first[n] + second[n]) + third[n])
        assert_close(keeper.state["anchor"][n], p.detach())


def test_online_ewc_is_of_one_kind() -> None:
    with pytest.raises(ValueError, match="use EWC"):
        OnlineEWC(mode="per-task")
