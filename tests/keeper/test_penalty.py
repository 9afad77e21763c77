"""What keeper.penalty() means: the formula of the sparsifier on post-activations of the chosen layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import selfless
from selfless import MAS, SLNI, SLNID, SNI, L1Rep, L2Param, OrthReg, SparingDeCov, functional
from tests import oracles
from tests.keeper.nets import Net, batches, seeded, sequential


@pytest.mark.parametrize(("build", "layers"), [(Net, ["fc1", "fc2"]), (Net, "auto"), (sequential, ["1", "3"]), (sequential, "auto")])
def test_penalty_is_the_formula_on_post_activations(build: Any, layers: Any) -> None:
    model, (x, _) = seeded(build), batches()[0]
    keeper = selfless.attach(model, sparsify=SLNI(0.5), layers=layers)
    first, second = (model.fc1, model.fc2) if build is Net else (model[0], model[2])
    for _ in range(2):  # the first pass discovers functional activations, the second uses what it found
        model(x)
        h1 = torch.relu(first(x).detach())
        h2 = torch.relu(second(h1).detach())
        assert_close(keeper.penalty(), 0.5 * (functional.slni(h1) + functional.slni(h2)))


def test_penalty_reaches_the_weights() -> None:
    model, (x, _) = seeded(), batches()[0]
    keeper = selfless.attach(model, sparsify=SNI(1.0), layers=["fc1"])
    for _ in range(2):
        model.zero_grad()
        model(x)
        keeper.penalty().backward()
        got = model.fc1.weight.grad.clone()
        model.zero_grad()
        functional.sni(torch.relu(F.linear(x, model.fc1.weight, model.fc1.bias))).backward()
        assert_close(got, model.fc1.weight.grad)


def test_all_takes_convolutions_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 2)),
    )
    x, found = torch.randn(5, 1, 6, 6), []
    for layers in ("all", ["2", "4", "7"], "auto"):
        keeper = selfless.attach(model, None, SLNID(1.0), layers=layers)
        model(x)
        found.append(keeper.penalty().item())
        keeper.detach()
    assert found[0] == pytest.approx(found[1])
    assert found[0] > found[2] > 0  # the fully connected layer alone
    with pytest.raises(ValueError, match="layers='all' found no hidden"):
        selfless.attach(nn.Sequential(nn.Linear(2, 2)), None, SLNID(1.0), layers="all")


def test_norm_dropout_and_shared_activations_are_followed() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8)
            self.act, self.head = nn.GELU(), nn.Linear(8, 3)  # one activation module, used twice

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.b(self.act(self.norm(self.a(x))))))

    model, (x, _) = seeded(Normed), batches()[0]
    keeper = selfless.attach(model, sparsify=L1Rep(1.0))
    for _ in range(2):
        model(x)
        h1 = F.gelu(model.norm(model.a(x)))
        want = functional.l1_rep(h1) + functional.l1_rep(F.gelu(model.b(h1)))
        keeper_value = keeper.penalty()
        assert_close(keeper_value, want)
        keeper.collector.drop()  # the oracle's own calls went through the hooks too
    assert list(keeper.taps) == ["a", "b"]


def test_several_passes_are_one_larger_batch() -> None:
    model = seeded()
    (x1, _), (x2, _) = batches()[:2]
    keeper = selfless.attach(model, sparsify=SLNI(1.0), layers=["fc1"])
    model(x1)
    keeper.penalty()
    model(x1)
    model(x2)
    h = torch.relu(F.linear(torch.cat([x1, x2]), model.fc1.weight, model.fc1.bias))
    assert_close(keeper.penalty(), functional.slni(h))


def test_eval_and_no_grad_passes_do_not_count() -> None:
    model, (x, _) = seeded(), batches()[0]
    keeper = selfless.attach(model, sparsify=SNI(1.0), layers=["fc1"])
    model(x)
    want = keeper.penalty()
    with torch.no_grad():
        model(x * 3)
    model.eval()
    model(x * 5)
    model.train()
    model(x)
    assert_close(keeper.penalty(), want)
    with torch.no_grad():
        assert keeper.penalty().item() == 0.0


def test_convolution_channels_and_conv1d() -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 3)))
    x = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    keeper = selfless.attach(model, MAS(), SLNID(1.0), layers=["0"])
    model(x)
    assert_close(keeper.penalty(), functional.slni(model[1](model[0](x)).detach()))
    keeper.consolidate([(x, torch.zeros(4).long())])
    assert keeper.alpha["0"].shape == (5,)

    model = seeded(lambda: nn.Sequential(nn.Conv1d(2, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(30, 3)))
    keeper = selfless.attach(model, MAS(), SLNID(1.0), layers=["1"])
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0))
    model(x)
    h = F.relu(F.conv1d(x, model[0].weight, model[0].bias)).transpose(1, 2)
    assert_close(keeper.penalty(), functional.slni(h))
    keeper.consolidate([x])
    assert keeper.alpha["1"].shape == (5,)


def test_a_discount_without_a_pair_form_reads_alpha_of_its_layer() -> None:
    model, (x, _) = seeded(sequential), batches()[0]
    keeper = selfless.attach(model, None, SparingDeCov(1.0), layers=["1", "3"])
    keeper.alpha = {"1": torch.linspace(0, 3, 16), "3": torch.linspace(2, 0, 12)}
    with torch.no_grad():
        h = model[:2](x)
        found = {"1": h, "3": model[2:4](h)}
    model(x)
    assert_close(keeper.penalty(), sum(oracles.sparing_decov(h, keeper.alpha[n], h.shape[1] / 6, "product") for n, h in found.items()))


def test_weight_decay_is_that_of_every_trainable_parameter() -> None:
    model, (x, _) = seeded(), batches()[0]
    keeper = selfless.attach(model, None, L2Param(0.1))
    model.fc1.bias.requires_grad_(False)
    model(x)
    cost = keeper.penalty()
    assert_close(cost, 0.1 * sum(functional.l2_param(p) for p in model.parameters() if p.requires_grad))
    assert keeper.log()["inhibition"] == pytest.approx(cost.item())


def test_weights_of_activation_layers_for_orth_reg() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.act1, self.head = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act1(self.fc1(x)))

    for layers in (["act1"], ["fc1"], "auto"):
        model, (x, _) = seeded(Named), batches()[0]
        keeper = selfless.attach(model, sparsify=OrthReg(1.0), layers=layers)
        model(x)
        assert_close(keeper.penalty(), functional.orth_reg(model.fc1.weight))
