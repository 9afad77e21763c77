"""AGS-CL: important neurons are held, silent ones are exactly 0 and start again, old tasks do not change at a large strength."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import AGSCL
from selfless.functional.groups import shrink_groups
from tests import oracles
from tests.preserve.heads import NAMES, accuracy, data, learn, made


def hidden(keeper: selfless.Keeper, layer: str) -> Tensor:
    """Ω of the neurons of a layer."""
    found: Tensor = keeper.state["importance"]["all"][keeper.state["rows"][f"{layer}.weight"]]
    return found


def values(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def silence(model: nn.Module) -> None:
    """Set the incoming weights of every second half of hidden neurons to 0, where they stay: their gradient is 0."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.startswith(("body", "0.")):
                p[len(p) // 2 :] = 0.0


# ---------------------------------------------------------------------------------------------------------- the proximal step
@pytest.mark.parametrize("amount", [0.0, 0.3, 2.0, 1e6])
def test_the_proximal_step_is_the_slow_minimum(amount: float) -> None:
    g = torch.Generator().manual_seed(0)
    weight, bias, centre, middle = (torch.randn(*s, generator=g, dtype=torch.float64) for s in [(5, 3, 2), (5,), (5, 3, 2), (5,)])
    weight[0], bias[0] = centre[0], middle[0]  # a group at its centre
    amounts = amount * torch.tensor([1.0, 1.0, 0.5, 2.0, 0.0], dtype=torch.float64)
    new = torch.cat([t.view(5, -1) for t in shrink_groups([weight, bias], [centre, middle], amounts)], 1)
    old, to = torch.cat([weight.view(5, -1), bias.view(5, 1)], 1), torch.cat([centre.view(5, -1), middle.view(5, 1)], 1)
    for n in range(5):
        want = oracles.shrunk(old[n].numpy(), to[n].numpy(), float(amounts[n]))
        assert_close(new[n], torch.tensor(want), rtol=1e-6, atol=1e-6)

        def cost(x: Tensor, n: int = n) -> Tensor:
            return 0.5 * (x - old[n]).square().sum(-1) + amounts[n] * (x - to[n]).norm(dim=-1)

        for size in (1e-3, 1e-1, 1.0):
            assert (cost(new[n] + size * torch.randn(50, 7, generator=g, dtype=torch.float64)) >= cost(new[n])).all()


def test_a_step_is_that_of_every_neuron_by_itself() -> None:
    """The optimizer's step, then for every neuron: cut what comes from unimportant neurons, shrink towards θ* or 0."""
    model = made()
    keeper = selfless.attach(model, AGSCL(0.3, mu=0.2), heads=NAMES)
    silence(model)
    keeper.consolidate(data(0), forward=lambda m, b: m(b[0], 0))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    omega = {layer: hidden(keeper, layer) for layer in ("body.0", "body.2")}
    assert all(0 < int((o == 0).sum()) < len(o) for o in omega.values())  # some of both kinds
    star, lr, momentum = keeper.state["anchor"], 0.05, 0.5
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    x, y = data(1)[0]
    F.cross_entropy(model(x, 1), y).backward()
    after = {n: p.detach() - (0 if p.grad is None else lr * p.grad) for n, p in model.named_parameters()}
    opt.step()
    step = lr / (1 - momentum)
    for layer, before in (("body.0", None), ("body.2", "body.0")):
        for n, weight in enumerate(omega[layer].tolist()):
            row = after[f"{layer}.weight"][n].clone()
            if weight and before:
                row[omega[before] == 0] = 0.0
            point = torch.cat([row, after[f"{layer}.bias"][n : n + 1]]).numpy()
            centre = torch.cat([star[f"{layer}.weight"][n], star[f"{layer}.bias"][n : n + 1]]).numpy() if weight else np.zeros_like(point)
            want = oracles.shrunk(point, centre, step * (0.3 * weight if weight else 0.2))
            got = torch.cat([model.get_parameter(f"{layer}.weight")[n], model.get_parameter(f"{layer}.bias")[n : n + 1]])
            assert_close(got.detach(), torch.tensor(want), rtol=1e-4, atol=1e-5)
    assert_close(model.heads[0].weight.detach(), star["heads.0.weight"], rtol=0, atol=0)
    assert_close(model.heads[1].weight.detach(), after["heads.1.weight"])  # the task's own head is free


# ----------------------------------------------------------------------------------------------------------- what it promises
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.slow
def test_at_a_large_strength_old_tasks_do_not_change_at_all(optimizer: str) -> None:
    """On any input; and the next task is learnt by the neurons that the first one left silent."""
    model = made()
    keeper = selfless.attach(model, AGSCL(1e6, mu=0.0, rho=1.0), heads=NAMES)
    silence(model)
    kinds: dict[str, Any] = {
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
    }
    x, kept = torch.randn(50, 6, generator=torch.Generator().manual_seed(9)), list[Tensor]()
    opt = kinds[optimizer]()  # lives on through all tasks
    for t in range(3):
        before, held = values(model), hidden(keeper, "body.2") > 0
        learn(model, keeper, t, epochs=12, optimizer=opt)
        assert_close(model.get_parameter("body.2.weight")[held], before["body.2.weight"][held], rtol=0, atol=0)
        assert t == 2 or accuracy(model, t) > 0.7  # for the third task no neuron is left
        for u, outputs in enumerate(kept):
            assert_close(model(x, u), outputs, rtol=1e-6, atol=1e-6)
        kept.append(model(x, t).detach())
    assert hidden(keeper, "body.0").count_nonzero() > 12


def test_a_large_mu_makes_groups_exactly_zero_and_they_start_again() -> None:
    model = made()
    start = values(model)
    keeper = selfless.attach(model, AGSCL(1.0, mu=1e6, rho=0.5), heads=NAMES)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(data(0)[0][0], 0), data(0)[0][1]).backward()
    opt.step()
    assert all(not p.any() for n, p in model.named_parameters() if n.startswith("body"))
    keeper.consolidate(data(0), forward=lambda m, b: m(b[0], 0))
    assert not hidden(keeper, "body.0").any()
    for name, size in (("body.0", 24), ("body.2", 16)):
        assert_close(model.get_parameter(f"{name}.weight")[: size // 2], start[f"{name}.weight"][: size // 2], rtol=0, atol=0)
        assert not model.get_parameter(f"{name}.weight")[size // 2 :].any()
    assert not model.heads[0].weight.any()  # nothing that starts again reaches the head of the old task
    assert model.heads[1].weight.all()


def test_importance_is_the_decayed_sum_of_mean_activities() -> None:
    """Over samples and positions; a convolution and a linear layer behind it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2))
    keeper = selfless.attach(model, AGSCL(1.0, mu=0.0, eta=0.5), layers=["1", "4"])
    want = torch.zeros(7)
    for t in range(3):
        batches = [torch.randn(8 + t, 1, 3, 3), torch.randn(3, 1, 3, 3)]
        x = torch.cat(batches)
        with torch.no_grad():
            new = torch.cat([model[:2](x).mean((0, 2, 3)), model[:5](x).mean(0)])
        keeper.consolidate(batches)
        want = 0.5 * want + new
        assert_close(keeper.state["importance"]["all"], torch.cat([want, torch.tensor([2 - 0.5**t])]))
    found = keeper.parts[0].term.importance(keeper.state)
    assert_close(found["0.weight"][:, 0, 1, 1], want[:3])
    assert keeper.capacity().tasks == 3


def test_in_a_shared_head_the_weights_of_important_neurons_are_held() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    keeper = selfless.attach(model, AGSCL(1e6, mu=0.0))
    silence(model[:1])
    for t in range(2):
        before, omega = values(model), hidden(keeper, "0")
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for x, y in data(t) * 10:
            loss = F.cross_entropy(model(x), y) + keeper.penalty()
            opt.zero_grad()
            loss.backward()
            opt.step()
        if t:
            moved = (model[2].weight - before["2.weight"]).abs().amax(0)
            assert not moved[omega > 0].any()
            assert moved[omega == 0].any()
            assert_close(model[2].bias.detach(), before["2.bias"], rtol=0, atol=0)
        keeper.consolidate(data(t))
        assert t or int((hidden(keeper, "0") > 0).sum()) == 6


@pytest.mark.parametrize(("strength", "mu"), [(0.0, 1e6), (1e-6, 0.0), (1.0, 1e6), (1e6, 1e6)])
def test_every_strength_is_finite_and_zero_is_plain_training(strength: float, mu: float) -> None:
    model, twin = made(), made()
    keeper, plain = selfless.attach(model, AGSCL(strength, mu=mu), heads=NAMES), selfless.attach(twin, "none", heads=NAMES)
    for t in range(2):
        learn(model, keeper, t, epochs=2)
        learn(twin, plain, t, epochs=2)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    if not strength:
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert_close(a, b, rtol=0, atol=0)


def test_only_what_an_optimizer_trains_is_changed_at_its_own_rate() -> None:
    model = made()
    keeper = selfless.attach(model, AGSCL(1.0, mu=1.0), heads=NAMES)
    before = values(model)
    groups = [{"params": model.body[0].parameters(), "lr": 0.01}, {"params": model.body[2].parameters(), "lr": 0.02}]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    torch.optim.SGD(groups, lr=1.0).step()
    for layer, rate in (("body.0", 0.01), ("body.2", 0.02)):
        norm = torch.cat([before[f"{layer}.weight"], before[f"{layer}.bias"][:, None]], 1).norm(dim=1)
        assert_close(model.get_parameter(f"{layer}.bias").detach(), before[f"{layer}.bias"] * (1 - rate / norm))
    torch.optim.SGD(model.heads.parameters(), lr=1.0).step()
    assert_close(model.heads[0].weight.detach(), before["heads.0.weight"])
    assert keeper.penalty().item() == 0.0


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"eta": 1.5}, "eta is 1.5; it is the share of Ω"), ({"rho": 2}, "rho is 2"), ({"mu": -1}, "mu is -1; it must be a number ≥ 0")],
)
def test_options_are_checked(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        AGSCL(1.0, **options)


def test_a_network_that_is_no_chain_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(ValueError, match=r"followed through linear layers and convolutions only; '1' \(LayerNorm\)"):
        selfless.attach(model, AGSCL(1.0), layers=["2"])
