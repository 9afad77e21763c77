"""Networks that are no chain of layers, in a fleet: mapped by `vmap`, or run in turn as on a GPU, they learn what they learn alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from selfless import MAS, SLNID, DeCov, LwF, NoSparsifier
from selfless.engine import fleet as fleets
from selfless.engine.cuda_graph import CannotCapture
from selfless.engine.fleet import Fleet
from selfless.engine.learner import Learner
from tests.engine.small_runs import on_gpu, small

pytestmark = pytest.mark.slow
MIXED = """
import torch
import torch.nn.functional as F
from torch import nn
class Mixed(nn.Module):
    hidden, hidden_conv = ("act2",), ("act1",)
    def __init__(self, outputs):
        super().__init__()
        self.conv, self.group, self.act1 = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()
        self.around, self.norm, self.qkv = nn.Conv2d(1, 4, 1), nn.LayerNorm(4), nn.Linear(4, 12)
        self.fc, self.act2, self.head = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs)
    def forward(self, x):
        tokens = self.act1(self.around(x) + self.group(self.conv(x))).flatten(2).mT
        query, key, value = self.qkv(self.norm(tokens)).chunk(3, -1)
        tokens = tokens + (query @ key.mT).softmax(-1) @ value
        return self.head(self.act2(self.fc(tokens.mean(1))))
class Reading(Mixed):
    def forward(self, x):
        return super().forward(x) if x.sum().item() > -1e9 else super().forward(-x)
def mixed(outputs, input_shape):
    return Mixed(outputs)
def reading(outputs, input_shape):
    return Reading(outputs)
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mixed_net.py").write_text(MIXED)
    monkeypatch.chdir(tmp_path)


def learn(runs: list[Any], in_turn: bool = False) -> Fleet:
    """The fleet after its tasks."""
    learner = Learner(runs)
    learner.fleet.stack.in_turn = in_turn and len(runs) > 1
    learner.learn()
    return learner.fleet


@pytest.mark.parametrize(
    ("preserve", "sparsify", "in_turn"),
    [(MAS(0.1), SLNID(1e-2), False), (MAS(0.1), SLNID(1e-2), True), (LwF(0.5), DeCov(1e-2), True)],
    ids=str,
)
def test_a_member_learns_what_it_learns_alone(tasks_npz: str, preserve: Any, sparsify: Any, in_turn: bool) -> None:
    """Residual connections, group and layer norm, attention; penalties in the backward pass or in the loss, a teacher."""
    runs = [small(tasks_npz, model="mixed_net:mixed", preserve=preserve, sparsify=sparsify, seed=s, epochs=1, tasks=2) for s in range(2)]
    together, alone = learn(runs, in_turn), learn(runs[1:])
    for name, p in alone.params.items():
        assert_close(together.params[name][1], p[0], rtol=1e-4, atol=1e-5)
    for group, tensors in alone.state.items():
        for name, t in tensors.items():
            assert_close(together.state[group][name][1], t[0], rtol=1e-3, atol=1e-4)


def test_members_in_turn_get_their_own_penalty(tasks_npz: str) -> None:
    """One member is inhibited and one is not: the second is as without a sparsifier."""
    settings = {"model": "mixed_net:mixed", "epochs": 1, "tasks": 1, "layers": "all"}
    runs = [small(tasks_npz, sparsify=SLNID(s), seed=1, **settings) for s in (0.3, 0.0)]
    both = learn(runs, in_turn=True)
    plain = learn([small(tasks_npz, sparsify=NoSparsifier(), seed=1, **settings)])
    assert any(not torch.allclose(p[0], p[1], rtol=1e-3) for p in both.params.values())
    for name, p in plain.params.items():
        assert_close(both.params[name][1], p[0], rtol=1e-4, atol=1e-5)


def test_a_step_that_cannot_be_captured_runs_without_a_graph(tasks_npz: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The word comes once, and what is learned is the same."""
    runs = [small(tasks_npz, model="mixed_net:mixed", epochs=2, tasks=1)]
    plain = learn(runs)

    def refuse(*_: Any) -> Any:
        raise CannotCapture("operation not permitted when stream is capturing")

    monkeypatch.setattr(fleets, "capture", refuse)
    monkeypatch.setattr(Fleet, "capturable", property(lambda fleet: not fleet.refused))
    with pytest.warns(UserWarning, match="mixed_net:mixed cannot be captured .* trains without one") as said:
        captured = learn(runs)
    assert len(said) == 1
    for name, p in plain.params.items():
        assert torch.equal(captured.params[name], p)


def test_a_network_that_vmap_cannot_differentiate_runs_in_turn(tasks_npz: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first captured step fails under `vmap`; what is learned is the same."""
    runs = [small(tasks_npz, model="mixed_net:mixed", seed=s, epochs=1, tasks=1) for s in range(2)]
    plain, learner = learn(runs), Learner(runs)

    def run(*_: Any) -> Any:
        if not learner.fleet.stack.in_turn:
            raise RuntimeError("LSE is not correctly aligned (strideH)")
        raise CannotCapture("there is no GPU here")

    monkeypatch.setattr(fleets, "capture", run)
    monkeypatch.setattr(Fleet, "capturable", property(lambda fleet: not fleet.refused))
    with pytest.warns(UserWarning, match="there is no GPU here"):
        learner.learn()
    assert learner.fleet.stack.in_turn
    for name, p in plain.params.items():
        assert_close(learner.fleet.params[name], p, rtol=1e-4, atol=1e-5)


@on_gpu
@pytest.mark.parametrize(("preserve", "sparsify"), [(MAS(0.1), SLNID(1e-2)), (LwF(0.5), DeCov(1e-2))], ids=str)
def test_a_gpu_captures_members_in_turn(tasks_npz: str, preserve: Any, sparsify: Any) -> None:
    """Each on a stream of its own, in one graph; what is learned is what a CPU learns."""
    settings = {"model": "mixed_net:mixed", "preserve": preserve, "sparsify": sparsify, "epochs": 2, "tasks": 2, "precision": "fp32"}
    runs = [small(tasks_npz, seed=s, **settings) for s in range(3)]
    gpu, cpu = Learner(runs, device="cuda"), Learner(runs)
    gpu.learn(), cpu.learn()
    assert gpu.fleet.stack.in_turn
    assert gpu.fleet.graphs
    for name, p in cpu.fleet.params.items():
        assert_close(gpu.fleet.params[name].cpu(), p, rtol=1e-2, atol=1e-3)


@on_gpu
def test_a_gpu_trains_a_network_that_reads_a_value(tasks_npz: str) -> None:
    """It cannot be captured; later fleets can, and random numbers still work."""
    runs = [small(tasks_npz, model="mixed_net:reading", seed=s, epochs=2, tasks=2, precision="fp32") for s in range(2)]
    gpu = Learner(runs, device="cuda")
    with pytest.warns(UserWarning, match="cannot be captured"):
        gpu.learn()
    assert not gpu.fleet.graphs
    with torch.random.fork_rng(devices=[0]):
        assert torch.isfinite(torch.rand(4, device="cuda")).all()
    other = Learner(
        [small(tasks_npz, model="mixed_net:mixed", seed=s, epochs=2, tasks=2, precision="fp32") for s in range(2)], device="cuda"
    )
    other.learn()
    assert other.fleet.graphs
    for name, p in other.fleet.params.items():
        assert_close(gpu.fleet.params[name], p, rtol=1e-2, atol=1e-3)


@on_gpu
def test_an_order_drawn_ahead_is_the_order_of_its_epoch(tasks_npz: str) -> None:
    learner = Learner([small(tasks_npz, seed=s, epochs=4) for s in range(2)], device="cuda")
    task, fleet = learner.streams[0].tasks[0], learner.fleet
    fleet.begin_task(learner.load([s.tasks[0].train for s in learner.streams]), task.heads, learner.streams[0].outputs)
    for epoch in (0, 1, 2, 1):
        fleet.train_epoch(0, epoch)
        assert torch.equal(fleet.step.order, fleet.step.data.order(fleet.seeds, 0, epoch))
