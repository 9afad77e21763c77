"""The core gives the same values, gradients and importances on a GPU. Skipped without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import oracles
import selfless
from selfless import MAS, SI, SLNID, functional, importance
from selfless.data import Augment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("n", [16, 128, 300, 4096])
@pytest.mark.parametrize("discount", ["product", "max"])
def test_formulas(n: int, discount: Any) -> None:
    h = torch.randn(8, n, generator=torch.Generator().manual_seed(0)).relu()
    alpha = 2 * (torch.arange(n) * 0.618 % 1)
    x = h.cuda().requires_grad_()
    value = functional.slnid(x, alpha.cuda(), discount=discount)
    y = h.double().requires_grad_()
    want = oracles.pairs(y, n / 6, alpha, discount)
    assert abs(value.item() - want.item()) <= 1e-5 * abs(want.item())
    (g,), (e,) = torch.autograd.grad(value, x), torch.autograd.grad(want, y)
    assert (g.cpu() - e).norm() <= 1e-5 * e.norm()


@pytest.mark.parametrize("augment", [Augment(crop=2, flip=True), Augment(resized=14, flip=True)])
def test_crops_are_the_same_on_both_devices(augment: Augment) -> None:
    x = torch.randint(0, 256, (200, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    here, there = (augment(x.to(device), torch.Generator().manual_seed(1)) for device in ("cpu", "cuda"))
    assert_close(there.cpu(), here, rtol=0, atol=0.1)  # pixel values go up to 255


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3)
        return nn.Sequential(*layers)


def test_importances() -> None:
    model, x = net().double(), torch.randn(9, 2, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want = importance.mas(model, [x])
    got = importance.mas(model.cuda(), [x])  # the batch is moved to the device of the model
    for name in want:
        assert_close(got[name].cpu(), want[name])
    assert importance.neurons(model, [x], layers=["2", "5"])["2"].device.type == "cuda"


@pytest.mark.parametrize("preserve", [MAS(0.1), SI(1.0)])
def test_mixed_precision_loop_and_moving_to_the_gpu_after_attach(preserve: Any) -> None:
    model = net()
    keeper = selfless.attach(model, preserve, SLNID(1e-3))
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    keeper.anchor_with(optimizer)
    scaler = torch.amp.GradScaler("cuda")
    g = torch.Generator().manual_seed(2)
    for _ in range(2):
        data = [(torch.randn(16, 2, 6, 6, generator=g).cuda(), torch.randint(0, 3, (16,), generator=g).cuda()) for _ in range(5)]
        for x, y in data:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y) + keeper.penalty()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        keeper.consolidate(data)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert keeper.state["omega"]["4.weight"].device.type == "cuda"
    assert keeper.state["omega"]["4.weight"].max() > 0
