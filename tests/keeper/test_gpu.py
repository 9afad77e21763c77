"""Importances and a mixed-precision loop on a GPU. Skipped without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import selfless
from selfless import MAS, SI, SLNID, importance

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
