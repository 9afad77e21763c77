"""Networks that draw random numbers in training, such as dropout: a member of a fleet draws what it draws alone, whoever else is in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from selfless import GPM, DeCov, LwF, NoPreserver, NoSparsifier, Run
from selfless.engine import batches
from selfless.engine.cuda_graph import capture
from selfless.engine.draws import Draws, draws_in_training
from selfless.engine.fleet import Fleet
from selfless.engine.learner import Learner
from selfless.models import build
from tests.engine.small_runs import on_gpu

NORMED = """
import torch.nn.functional as F
from torch import nn
class Normed(nn.Module):
    hidden, hidden_conv = ("act2",), ("act1",)
    def __init__(self, outputs):
        super().__init__()
        self.conv, self.norm, self.act1 = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU()
        self.drop, self.fc, self.act2, self.head = nn.Dropout(0.2), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, outputs)
    def forward(self, x):
        x = self.drop(self.act1(self.norm(self.conv(x)))).flatten(1)
        return self.head(F.dropout(self.act2(self.fc(x)), 0.5, self.training))
class Reading(Normed):
    def forward(self, x):
        return super().forward(x) if x.sum().item() > -1e9 else super().forward(-x)
def normed(outputs, input_shape):
    return Normed(outputs)
def reading(outputs, input_shape):
    return Reading(outputs)
def plain(outputs, input_shape):
    conv = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(0.2), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*conv, nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, outputs))
"""
IN_TURN = {"model": "normed_net:normed"}
NATIVE = {"model": "normed_net:plain"}
CNN = {"model": "cnn-8", "model_options": {"dropout": 0.5, "padding": "same"}}
DISTILLED = {"preserve": LwF(1.0), "sparsify": DeCov(1e-2), "layers": "all"}
PROJECTED = {"preserve": GPM(0.9, samples=20)}


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "normed_net.py").write_text(NORMED)
    monkeypatch.chdir(tmp_path)


def runs_of(data: str, count: int = 3, **changes: Any) -> list[Run]:
    base = {"stream": data, "preserve": NoPreserver(), "sparsify": NoSparsifier(), "epochs": 2, "tasks": 2, "batch": 50, "lr": 0.05}
    return [Run(**(base | {"seed": seed} | changes)) for seed in range(count)]


def learned(runs: Sequence[Run], device: str = "cpu") -> Fleet:
    learner = Learner(runs, device=device)
    learner.learn()
    return learner.fleet


def first_epoch(runs: Sequence[Run], device: str = "cpu") -> Fleet:
    learner = Learner(runs, device=device)
    task, data = learner.streams[0].tasks[0], learner.load([s.tasks[0].train for s in learner.streams])
    learner.fleet.begin_task(data, task.heads, learner.streams[0].outputs)
    learner.fleet.train_epoch(0, 0)
    return learner.fleet


def assert_same(fleet: Fleet, m: int, other: Fleet, of: int = 0, **tolerance: float) -> None:
    """Member m of a fleet has the parameters of a member of another fleet; without a tolerance, the same bits."""
    for name, p in other.params.items():
        assert_close(fleet.params[name][m], p[of], **(tolerance or {"rtol": 0, "atol": 0}), msg=lambda s, n=name: f"{n}: {s}")


# ------------------------------------------------------------------------------------------------------------- the generators
def test_members_draw_from_their_own_generators_in_any_order() -> None:
    drop, x, draws = nn.Dropout(0.3), torch.rand(2, 5, 7), Draws(2, torch.device("cpu"))
    draws.seed([7, 8])
    torch.manual_seed(1)
    state = torch.get_rng_state()
    with draws.member(1):
        first = F.dropout(x[1], 0.3)
    found = torch.stack([draws.by_member(drop, x) for _ in range(2)])
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    wanted = [drop(x[0]) for _ in range(2)]
    torch.manual_seed(8)
    assert torch.equal(first, drop(x[1]))
    assert torch.equal(found, torch.stack([torch.stack([own, drop(x[1])]) for own in wanted]))


def test_random_numbers_of_a_network_are_found_by_running_it() -> None:
    class Functional(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.1, self.training)

    assert draws_in_training(Functional(3, 2), (3,))
    assert draws_in_training(build("alexnet-cifar", outputs=2, input_shape=(1, 20, 20), fc_units=4), (1, 20, 20))
    assert not draws_in_training(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.0)), (3,))
    normed = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert not draws_in_training(normed, (3,))
    assert int(normed[1].num_batches_tracked) == 0  # the network is as it was


# ------------------------------------------------------------------------------------------------------------------ the fleets
@pytest.mark.parametrize("method", [{}, PROJECTED, DISTILLED], ids=["none", "gpm", "lwf"])
def test_members_in_turn_have_the_bits_that_they_have_alone(tasks_npz: str, method: dict[str, Any]) -> None:
    runs = runs_of(tasks_npz, **IN_TURN, **method)
    three, two, alone = (learned(some) for some in (runs, runs[1:], runs[1:2]))
    assert three.stack.in_turn
    assert alone.stack.bound
    rounding = {"rtol": 1e-5, "atol": 1e-6} if method is DISTILLED else {}  # the teacher of a run alone is mapped
    assert_same(three, 1, alone, **rounding)
    assert_same(three, 1, two)
    assert_same(three, 2, two, 1)


@pytest.mark.parametrize("method", [{}, DISTILLED], ids=["none", "lwf"])
def test_a_native_network_draws_the_masks_that_it_draws_alone(tasks_npz: str, method: dict[str, Any]) -> None:
    runs = runs_of(tasks_npz, **NATIVE, **method)
    three, alone = learned(runs), learned(runs[1:2])
    assert three.stack.native
    assert three.stack.draws is not None
    assert_same(three, 1, alone, rtol=1e-4, atol=1e-5)


def images(folder: Path, shape: tuple[int, ...], count: int, classes: int = 4) -> str:
    """Two tasks of random images."""
    y, rng = np.arange(count) % classes, np.random.Generator(np.random.PCG64(0))
    x, task = rng.integers(0, 256, (count, *shape)).astype(np.uint8), y // (classes // 2)
    np.savez(folder / "images.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8], task=task, task_test=task[:8])
    return f"arrays:{folder / 'images.npz'}"


@pytest.mark.slow
def test_alexnet_cifar_trains_as_a_fleet(tmp_path: Path) -> None:
    narrow = {"model": "alexnet-cifar", "model_options": {"fc_units": 4}, "epochs": 1, "tasks": 1, "batch": 6}
    runs = runs_of(images(tmp_path, (1, 20, 20), 12), 2, **narrow)
    together = learned(runs)
    assert together.stack.native
    assert_same(together, 1, learned(runs[1:]), rtol=1e-4, atol=1e-5)


def test_batch_statistics_in_evaluation_do_not_depend_on_the_other_members(tasks_npz: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of samples in a pass changes what a network with batch statistics returns, so it is that of the member alone."""
    monkeypatch.setattr(batches, "EVALUATE", 40)
    runs = runs_of(tasks_npz, **IN_TURN, tasks=1, epochs=1, batch=30)
    learner, alone = Learner(runs), Learner(runs[1:2])
    assert learner.learn()[1].capacity == alone.learn()[0].capacity
    for name, alpha in alone.fleet.alpha.items():
        assert torch.equal(learner.fleet.alpha[name][1], alpha[0])


def test_members_with_one_seed_draw_alike_and_others_do_not(tasks_npz: str) -> None:
    """Runs that differ in a strength have the same masks, as they have alone."""
    (run,) = runs_of(tasks_npz, 1, **CNN, batch=130)
    fleet = first_epoch([run, run.replace(lr=0.0500001), run.replace(seed=1)])
    weight = fleet.params["fc5.weight"]
    assert_close(weight[0], weight[1], rtol=1e-3, atol=1e-5)
    assert not torch.allclose(weight[0], weight[2], rtol=1e-3, atol=1e-5)


def test_steps_that_are_taken_again_draw_the_same(tasks_npz: str) -> None:
    fleet = first_epoch(runs_of(tasks_npz, 2, **IN_TURN))
    after = {name: p.detach().clone() for name, p in fleet.params.items()}
    with fleet.rewound(0, 0, len(fleet.loss_sums)):
        assert all(torch.equal(p, after[name]) for name, p in fleet.params.items())
    with fleet.rewound(0, 1, len(fleet.loss_sums)):  # the masks of another epoch
        assert not all(torch.equal(p, after[name]) for name, p in fleet.params.items())


# ----------------------------------------------------------------------------------------------------------------------- a GPU
@on_gpu
def test_a_gpu_replays_the_masks_of_every_member() -> None:
    """They differ between members and replays, begin again with the seed, and are those of each seed alone."""
    device, drop = torch.device("cuda"), nn.Dropout(0.5)
    x, out, draws = torch.ones(3, 64, 32, device=device), torch.zeros(3, 64, 32, device=device), Draws(3, device)

    def step() -> None:
        out.copy_(draws.by_member(drop, x))

    draws.seed([4, 5, 6])
    graph = capture(step, lambda: None, [out], draws.generators)
    assert not out.any()

    def replays(seeds: list[int]) -> Tensor:
        draws.seed(seeds)
        found = []
        for _ in range(3):
            graph.replay()
            found.append(out.clone())
        return torch.stack(found)

    masks = replays([4, 5, 6])
    flat = masks.flatten(0, 1).flatten(1)
    assert len({tuple(row) for row in (flat > 0).tolist()}) == 9
    assert abs(float((masks > 0).float().mean()) - 0.5) < 0.02
    assert torch.equal(replays([4, 5, 6]), masks)
    assert torch.equal(replays([4, 9, 6])[:, [0, 2]], masks[:, [0, 2]])
    for m, seed in enumerate([4, 5, 6]):
        torch.cuda.manual_seed(seed)
        assert torch.equal(torch.stack([drop(x[m]) for _ in range(3)]), masks[:, m])


@on_gpu
@pytest.mark.parametrize("method", [{}, DISTILLED, PROJECTED], ids=["none", "lwf", "gpm"])
@pytest.mark.parametrize("network", [IN_TURN, NATIVE, CNN], ids=["in turn", "native", "cnn"])
def test_a_gpu_captures_fleets_with_dropout(
    tasks_npz: str, network: dict[str, Any], method: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured fleet, a fleet without graphs and a run alone have the same masks, so they learn the same; other masks differ by more."""
    runs = runs_of(tasks_npz, precision="fp32", **network, **method)
    captured, alone = learned(runs, "cuda"), learned(runs[1:2], "cuda")
    assert captured.graphs
    assert captured.stack.draws is not None
    with monkeypatch.context() as patch:
        patch.setattr(Fleet, "capturable", False)
        eager = learned(runs, "cuda")
    for m in range(3):
        assert_same(captured, m, eager, m, rtol=1e-2, atol=1e-3)
    assert_same(captured, 1, alone, rtol=1e-2, atol=1e-3)
    monkeypatch.setattr("selfless.engine.rng.one_seed", lambda seed, purpose, *place: seed + sum(place))
    other = learned(runs[1:2], "cuda")
    assert not all(torch.allclose(p[0], other.params[name][0], rtol=1e-2, atol=1e-3) for name, p in alone.params.items())


@on_gpu
def test_a_gpu_trains_a_network_with_dropout_that_cannot_be_captured(tasks_npz: str) -> None:
    runs = runs_of(tasks_npz, 2, precision="fp32")
    with pytest.warns(UserWarning, match="cannot be captured"):
        reading = learned([run.replace(model="normed_net:reading") for run in runs], "cuda")
    assert not reading.graphs
    captured = learned([run.replace(model="normed_net:normed") for run in runs], "cuda")
    assert captured.graphs
    for m in range(2):
        assert_same(reading, m, captured, m, rtol=1e-2, atol=1e-3)


@on_gpu
@pytest.mark.slow
def test_a_gpu_trains_a_large_fleet_of_alexnet_cifar(tmp_path: Path) -> None:
    """Fourteen members of the full size fit, and their step is captured."""
    torch.cuda.reset_peak_memory_stats()
    fleet = learned(runs_of(images(tmp_path, (3, 32, 32), 1280, 20), 14, model="alexnet-cifar", batch=64, **DISTILLED), "cuda")
    assert fleet.stack.native
    assert fleet.graphs
    assert torch.cuda.max_memory_allocated() < 64 * 2**30
