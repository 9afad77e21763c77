"""AlexNet in the engine, as table 2 needs it: one head a task, dropout off for SLNID, fleets, importances. 64×64 pixels, few units."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import selfless
from selfless import MAS, SLNID, NoPreserver, Run, importance
from selfless.engine.learner import Learner
from selfless.engine.native.forward import in_order, is_native
from selfless.models import build
from selfless.runner.plan import fleets
from tests.engine.small_runs import on_gpu

NARROW = {"fc": "random", "fc_units": 8}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two tasks of two and three classes."""
    rng = np.random.Generator(np.random.PCG64(1))
    y = np.arange(15) % 5
    x = rng.integers(0, 256, (15, 3, 64, 64)).astype(np.uint8)
    path = tmp_path_factory.mktemp("photos") / "photos.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y, task=(y > 1).astype(int), task_test=(y > 1).astype(int))
    return f"arrays:{path}"


def run(photos: str, **changes: Any) -> Run:
    base = {"stream": photos, "model": "alexnet", "model_options": NARROW, "preserve": MAS(1.0), "sparsify": SLNID(1e-3), "epochs": 1}
    return Run(**(base | {"batch": 4, "lr": 0.01} | changes))


def test_its_layers_run_on_the_stack_in_their_order() -> None:
    model = build("alexnet", outputs=5, input_shape=(3, 64, 64), **NARROW)
    assert is_native(model)
    names = [name for name, _ in in_order(model)]
    assert names[0] == "features.0"
    assert names[-4:] == ["classifier.3", "classifier.4", "classifier.5", "head"]
    assert not is_native(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), nn.Linear(2, 2)))
    shared = nn.ReLU()
    assert not is_native(nn.Sequential(nn.Sequential(nn.Linear(2, 2), shared), shared))


@pytest.mark.whole
def test_a_member_of_a_fleet_is_the_run_alone(photos: str) -> None:
    runs = [run(photos, seed=s, sparsify=SLNID(1e-3 * (s + 1))) for s in range(2)]
    together = Learner(runs)
    together.learn()
    alone = Learner(runs[1:])
    alone.learn()
    for name, p in alone.fleet.params.items():
        assert_close(together.fleet.params[name][1], p[0], rtol=1e-3, atol=1e-5)
    for name, omega in alone.fleet.state["omega"].items():
        assert_close(together.fleet.state["omega"][name][1], omega[0], rtol=1e-3, atol=1e-4)
    assert set(together.fleet.alpha) == {"classifier.2", "classifier.5"}


@pytest.mark.slow
def test_its_importances_are_the_exact_ones(photos: str) -> None:
    """Ω of the engine, layer by layer on the stack, against `selfless.importance` on the network itself."""
    learner = Learner([run(photos, stream_options={}, tasks=1)])
    learner.learn()
    model = build("alexnet", outputs=2, input_shape=(3, 64, 64), **NARROW)
    model.load_state_dict({name: p[0].detach() for name, p in learner.fleet.params.items()})
    data = learner.streams[0].tasks[0].train.resident("cpu")
    x, _ = data.batch(torch.arange(len(data)))
    exact = importance.mas(model, [x])
    for name, omega in learner.fleet.state["omega"].items():
        assert_close(omega[0], exact[name], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_every_task_has_a_head_of_its_own(photos: str) -> None:
    """Five columns, two of them the first task's: learning the second leaves them as they were, and moves everything before."""
    first = Learner([run(photos, preserve=NoPreserver(), tasks=2)])
    heads = [task.heads for task in first.streams[0].tasks]
    assert heads == [(range(0, 2),), (range(2, 5),)]
    assert first.fleet.params["head.weight"].shape == (1, 5, 8)
    kept = {}
    learn = first.fleet.begin_task

    def begin(*arguments: Any) -> None:
        learn(*arguments)
        kept[first.fleet.tasks] = {n: p.detach().clone() for n, p in first.fleet.params.items()}

    first.fleet.begin_task = begin  # type: ignore[method-assign]
    result = first.learn()[0]
    now = first.fleet.params
    for part in ("weight", "bias"):
        assert torch.equal(now[f"head.{part}"][:, :2], kept[1][f"head.{part}"][:, :2])
        assert not torch.equal(now[f"head.{part}"][:, 2:], kept[1][f"head.{part}"][:, 2:])
        assert torch.equal(kept[0][f"head.{part}"][:, 2:], kept[1][f"head.{part}"][:, 2:])
    assert not torch.equal(now["features.0.weight"], kept[1]["features.0.weight"])
    assert result.accuracy.shape == (2, 2)


@pytest.mark.slow
def test_dropout_is_off_unless_asked_for(photos: str) -> None:
    assert not any(isinstance(m, nn.Dropout) for m in Learner([run(photos)]).fleet.stack.module.modules())
    dropped = run(photos, tasks=1, sparsify="none", model_options=NARROW | {"dropout": 0.5})
    learner = Learner([dropped])
    module = learner.fleet.stack.module
    assert [m.p for m in module.modules() if isinstance(m, nn.Dropout)] == [0.5, 0.5]
    alone, x = build("alexnet", outputs=5, input_shape=(3, 64, 64), seed=0, dropout=0.5, **NARROW), torch.rand(2, 3, 64, 64)
    assert not torch.equal(alone.train()(x), alone(x))
    assert torch.equal(alone.eval()(x), alone(x))
    plain = Learner([dataclasses.replace(dropped, model_options=NARROW)])
    results = learner.learn(), plain.learn()
    assert [r.status for (r,) in results] == ["done", "done"]
    assert not torch.equal(learner.fleet.params["classifier.4.weight"], plain.fleet.params["classifier.4.weight"])
    again = Learner([dropped])
    again.learn()
    assert torch.equal(learner.fleet.params["classifier.4.weight"], again.fleet.params["classifier.4.weight"])
    assert [len(f) for f in fleets([dataclasses.replace(dropped, seed=s) for s in range(2)])] == [1, 1]
    assert [len(f) for f in fleets([run(photos, stream="objects:birds", seed=s) for s in range(2)])] == [2]


@pytest.mark.slow
def test_weights_of_ones_own_are_part_of_the_cache(photos: str, tmp_path: Path) -> None:
    def save(value: float) -> None:
        state = build("alexnet", outputs=1, input_shape=(3, 64, 64), **NARROW).features.state_dict()
        np.savez(tmp_path / "own.npz", **{f"features.{n}": np.full(t.shape, value, np.float32) for n, t in state.items()})

    save(0.001)
    one = run(photos, tasks=1, model_options=NARROW | {"weights": str(tmp_path / "own.npz")})
    first = selfless.train(one, out=tmp_path / "out")
    assert selfless.train(one, out=tmp_path / "out").about == first.about
    save(0.002)
    assert selfless.train(one, out=tmp_path / "out").about["made_from"] != first.about["made_from"]


@on_gpu
@pytest.mark.parametrize("members", [1, 2])
def test_a_gpu_computes_what_a_cpu_does(photos: str, members: int) -> None:
    runs = [run(photos, seed=s, precision="fp32", schedule="cosine") for s in range(members)]
    cpu, gpu = Learner(runs), Learner(runs, device="cuda")
    cpu.learn()
    gpu.learn()
    for name, p in cpu.fleet.params.items():
        assert_close(gpu.fleet.params[name].cpu(), p, rtol=1e-2, atol=1e-3)
    for name, omega in cpu.fleet.state["omega"].items():
        assert_close(gpu.fleet.state["omega"][name].cpu(), omega, rtol=2e-2, atol=1e-3)


@on_gpu
@pytest.mark.parametrize("preserve", ["none", "lwf:1", "ebll:1", "imm:1e-3", "si:1", "ewc:10", "mas:1"])
def test_the_rows_of_table_2_on_a_gpu(photos: str, preserve: Any) -> None:
    options = {"sparsify": "none", "model_options": NARROW | {"dropout": 0.5}, "precision": "bf16", "schedule": "cosine"}
    (result,) = Learner([run(photos, preserve=preserve, **options)], device="cuda").learn()
    assert result.status == "done", result.error
