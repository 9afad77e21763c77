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
        model[1].eval()  # its statistics would follow the second task
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


def plain_net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3)).cuda()


def tasks() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    g = torch.Generator().manual_seed(3)
    return [[(torch.randn(16, 8, generator=g).cuda(), torch.randint(0, 3, (16,), generator=g).cuda()) for _ in range(5)] for _ in range(2)]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("preserve", [MAS(0.1), SI(1.0)])
def test_injected_gradients_are_scaled_as_the_loss_is(preserve: Any, half: bool) -> None:
    """Two tasks with a GradScaler end at the same weights, with penalty() and with inject=True."""
    found = []
    for inject in (False, True):
        model = plain_net()
        keeper = selfless.attach(model, preserve, SLNID(1e-2), inject=inject)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        keeper.scale = scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        for data in tasks():
            for x, y in data:
                with torch.autocast("cuda", dtype=torch.float16, enabled=half):
                    loss = F.cross_entropy(model(x), y)
                    loss = loss if inject else loss + keeper.penalty()
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            keeper.consolidate(data)
        found.append([p.detach().clone() for p in model.parameters()])
    for p, q in zip(*found, strict=True):
        assert_close(q, p, rtol=1e-2 if half else 1e-3, atol=1e-3 if half else 1e-5)


@pytest.mark.parametrize("implicit", [False, True])
def test_a_state_on_the_cpu(implicit: bool) -> None:
    found = []
    for device in (None, "cpu"):
        model = plain_net()
        keeper = selfless.attach(model, MAS(0.5), SLNID(1e-3), state_device=device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        if implicit:
            keeper.anchor_with(optimizer)
        for data in tasks():
            for x, y in data:
                optimizer.zero_grad()
                (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
                optimizer.step()
            keeper.consolidate(data)
        assert {t.device.type for ts in keeper.state.values() for t in ts.values()} == {device or "cuda"}
        assert keeper.log()["drift"] == pytest.approx(0, abs=1e-6)
        assert keeper.capacity().tasks == 2
        found.append([p.detach().clone() for p in model.parameters()])
    for p, q in zip(*found, strict=True):
        assert_close(q, p, rtol=1e-3, atol=1e-5)


def test_a_captured_step_of_ones_own_loop() -> None:
    """Forward, penalty, backward, SGD and anchor as one CUDA graph: replaying it is training."""
    g = torch.Generator().manual_seed(3)
    data = [(torch.randn(16, 12, generator=g).cuda(), torch.randint(0, 3, (16,), generator=g).cuda()) for _ in range(6)]
    trained = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        keeper = selfless.attach(model, MAS(0.1), SLNID(1e-2), check_finite=False)
        keeper.anchor_with(optimizer)
        x, y = (t.clone() for t in data[0])

        def step(model: nn.Module = model, keeper: Any = keeper, optimizer: Any = optimizer, x: Any = x, y: Any = y) -> None:
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
            optimizer.step()

        keeper.consolidate(data)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                step()
        for a, b in data:
            x.copy_(a), y.copy_(b)
            graph.replay() if captured else step()
        trained.append([p.detach().clone() for p in model.parameters()])
        keeper.detach()
    for a, b in zip(*trained, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)
