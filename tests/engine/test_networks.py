"""Networks of users: convolutions, batch norm, any module, unusual layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from torch.testing import assert_close

from selfless import (
    EBLL,
    GPM,
    HAT,
    IMM,
    LocalMAS,
    LwF,
    OrthReg,
    PackNet,
)
from selfless.engine.learner import Learner
from selfless.engine.native.forward import inhibited
from selfless.engine.native.options import PairGradient
from tests.engine.small_runs import small

pytestmark = pytest.mark.slow


def test_convolutions_and_batch_norm_in_a_fleet(tasks_npz: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mynets.py").write_text(
        "from torch import nn\n"
        "def plain(outputs, input_shape):\n"
        "    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, outputs))\n"
        "def normed(outputs, input_shape):\n"
        "    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(),\n"
        "                         nn.Linear(8, outputs))\n"
    )
    monkeypatch.chdir(tmp_path)
    for model in ("mynets:plain", "mynets:normed"):
        runs = [small(tasks_npz, model=model, epochs=1, seed=s, layers="all") for s in range(2)]
        learner = Learner(runs)
        together = learner.learn()
        for m, run in enumerate(runs):
            alone = Learner([run])
            assert_allclose(alone.learn()[0].accuracy, together[m].accuracy, atol=0.026)
            for name, omega in alone.fleet.state["omega"].items():
                assert_close(learner.fleet.state["omega"][name][m], omega[0], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_inhibit_each_other_at_every_position(dtype: torch.dtype) -> None:
    """Σ over positions of hᵀSh, every position a sample; in bf16 to its precision."""
    gen = torch.Generator().manual_seed(0)
    h, pairs = torch.randn(2, 3, 4, 5, 5, generator=gen).relu().to(dtype), torch.rand(2, 4, 4, generator=gen)
    x = h.clone().requires_grad_()
    inhibited(x, [PairGradient(matrix=pairs)]).sum().backward()
    assert x.grad is not None
    want = 1 + torch.einsum("fbchw,fcd->fbdhw", h.float(), pairs) / (3 * 25)
    assert_close(x.grad.float(), want, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "preserve", [LwF(0.5), EBLL(0.5, steps=10), IMM(0.1, drop=0.3), PackNet(0.5), HAT(0.1, s_max=50.0), LocalMAS(0.01), GPM(0.8)], ids=str
)
def test_the_rivals_in_a_fleet_of_anybodys_module(tasks_npz: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, preserve: Any) -> None:
    """A module with a forward of its own, convolutions and all: mapped by vmap in a fleet, run as it is alone."""
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, outputs):\n"
        "        super().__init__()\n"
        "        self.conv, self.act1, self.fc = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Linear(64, 8)\n"
        "        self.act2, self.head = nn.ReLU(), nn.Linear(8, outputs)\n"
        "    def forward(self, x):\n"
        "        return self.head(self.act2(self.fc(self.act1(self.conv(x)).flatten(1))))\n"
        "def build(outputs, input_shape):\n"
        "    return Net(outputs)\n"
    )
    monkeypatch.chdir(tmp_path)
    runs = [small(tasks_npz, model="mine:build", preserve=preserve, seed=s, tasks=2) for s in range(2)]
    learner = Learner(runs)
    assert not learner.fleet.stack.native
    together = learner.learn()
    for m, run in enumerate(runs):
        alone = Learner([run])
        assert_allclose(alone.learn()[0].accuracy, together[m].accuracy, atol=0.026)
        for name, p in alone.fleet.params.items():
            assert_close(learner.fleet.params[name][m], p[0], rtol=1e-3, atol=1e-4)


UNUSUAL = """
from torch import nn
from selfless.activations import LWTA, Maxout
def maps(outputs, input_shape):
    net = nn.Sequential(nn.Conv2d(1, 8, 3), Maxout(2), nn.Conv2d(4, 6, 3), LWTA(2), nn.Flatten(), nn.Linear(24, outputs))
    net.hidden, net.hidden_conv = (), ("1", "3")
    return net
def frozen(outputs, input_shape):
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, outputs))
    net[1].weight.requires_grad_(False)
    return net
def named_linear(outputs, input_shape):
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, outputs))
    net.hidden = ("1",)
    return net
def positions(outputs, input_shape):
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Flatten(), nn.Linear(30, outputs))
"""


def test_unusual_networks_of_ones_own(tasks_npz: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "unusual.py").write_text(UNUSUAL)
    monkeypatch.chdir(tmp_path)
    for name, change in (("maps", {"layers": "all"}), ("frozen", {"sparsify": OrthReg(1e-2)})):
        runs = [small(tasks_npz, model=f"unusual:{name}", epochs=1, seed=s, **change) for s in range(2)]
        learner = Learner(runs)
        learner.learn()
        alone = Learner([runs[1]])
        alone.learn()
        for key, p in alone.fleet.params.items():
            assert_close(learner.fleet.params[key][1], p[0], rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="hidden names '1', a Linear; it must name activation modules"):
        Learner([small(tasks_npz, model="unusual:named_linear")])
    with pytest.raises(ValueError, match=r"layer '1' gives \(\d, 1, 6, 5\) from a Linear: .* flatten the positions"):
        Learner([small(tasks_npz, model="unusual:positions")]).learn()
