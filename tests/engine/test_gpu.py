"""The same numbers on a GPU: recorded steps, fleets, resuming. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

import selfless
from selfless import EBLL, EWC, HAT, MAS, SGP, SI, SLNID, DeCov, L1Rep, LwF, NoSparsifier, PackNet, Run, RWalk
from selfless.engine.cuda_graph import capture
from selfless.engine.fleet import Fleet
from selfless.engine.learner import Event, Learner
from selfless.engine.native.hardware import side_by_side
from selfless.functional import scale
from tests.engine.small_runs import on_gpu
from tests.test_contracts import PRESERVE

pytestmark = [on_gpu, pytest.mark.usefixtures("every_epoch_saved")]


def small(data: str, **changes: Any) -> Run:
    base = {"stream": data, "model": "mlp-12", "preserve": MAS(0.1), "sparsify": SLNID(1e-2), "epochs": 2, "batch": 50, "lr": 0.05}
    return Run(**(base | {"precision": "fp32"} | changes))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"preserve": EWC(5.0)},
        {"preserve": SI(1.0)},
        {"preserve": LwF(1.0)},
        {"preserve": RWalk(0.5, every=2)},
        {"schedule": "cosine"},
        {"schedule": "step", "epochs": 10},
        {"optimizer": "adam", "lr": 1e-3},
        {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.1, "schedule": "cosine", "preserve": EWC(5.0)},
        {"ramp": 2, "epochs": 3},
        {"ramp": 2, "epochs": 3, "schedule": "cosine"},
        {"augment": "crop-flip"},
        {"model": "mlp-12-maxout"},
    ],
    ids=str,
)
@pytest.mark.parametrize("members", [1, 3])
def test_a_gpu_computes_what_a_cpu_does(tasks_npz: str, change: dict[str, Any], members: int) -> None:
    kinds = [SLNID(1e-2), NoSparsifier(), DeCov(1e-3)]
    runs = [small(tasks_npz, sparsify=kinds[m], seed=m, **{"epochs": 1, **change}) for m in range(members)]
    cpu, gpu = Learner(runs), Learner(runs, device="cuda")
    for a, b in zip(cpu.learn(), gpu.learn(), strict=True):
        assert_allclose(a.accuracy, b.accuracy, atol=0.051)
    for name, p in cpu.fleet.params.items():
        assert_close(gpu.fleet.params[name].cpu(), p, rtol=1e-2, atol=1e-3)


def captured_and_eager(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is replayed does what the same step does when it is called, over several tasks and phases."""
    captured = Learner(runs, device="cuda")
    found = captured.learn()
    if runs[0].preserve.capturable:
        assert captured.fleet.graphs
    with monkeypatch.context() as patch:
        patch.setattr(Fleet, "capturable", False)
        eager = Learner(runs, device="cuda")
        wanted = eager.learn()
    assert not eager.fleet.graphs
    for a, b in zip(found, wanted, strict=True):
        assert_allclose(a.accuracy, b.accuracy, atol=0.051)
        assert [len(task) for task in a.history] == [len(task) for task in b.history]
    for name, p in eager.fleet.params.items():
        assert_close(captured.fleet.params[name], p, rtol=1e-2, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    for group, held in eager.fleet.state.items():
        for name, value in held.items():
            assert_close(captured.fleet.state[group][name], value, rtol=2e-2, atol=1e-3, msg=lambda m, n=(group, name): f"{n}: {m}")


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("name", PRESERVE)
def test_a_captured_step_is_the_step(tasks_npz: str, monkeypatch: pytest.MonkeyPatch, name: str, members: int, schedule: Any) -> None:
    kinds = [SLNID(1e-2), NoSparsifier(), DeCov(1e-3)]
    runs = [small(tasks_npz, preserve=PRESERVE[name], sparsify=kinds[m], seed=m, schedule=schedule, epochs=3) for m in range(members)]
    captured_and_eager(runs, monkeypatch)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_captured_step_measures_strengths(tasks_npz: str, monkeypatch: pytest.MonkeyPatch, schedule: Any) -> None:
    monkeypatch.setattr(scale, "FIRST_LOOK", 2.0)
    kinds, chosen = [SLNID("auto"), SLNID("auto", sigma=2.0), SLNID(1e-2)], {"preserve": MAS("auto"), "schedule": schedule}
    captured_and_eager([small(tasks_npz, sparsify=kinds[m], seed=m, epochs=2, **chosen) for m in range(3)], monkeypatch)


@pytest.mark.parametrize("preserve", [MAS(0.1), SI(1.0), PackNet(0.5)], ids=str)
def test_a_captured_step_of_adam(tasks_npz: str, monkeypatch: pytest.MonkeyPatch, preserve: Any) -> None:
    captured_and_eager([small(tasks_npz, preserve=preserve, optimizer="adam", lr=1e-3, seed=m) for m in range(2)], monkeypatch)


@pytest.mark.parametrize("preserve", [LwF(1.0, warmup=1), RWalk(0.5), PackNet(0.5), HAT(0.1, s_max=50.0), SGP(0.8)], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("network", "members"), [("net", 2), ("wide", 6)])
def test_a_captured_step_of_the_rivals_with_convolutions(
    tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preserve: Any, precision: Any, network: str, members: int
) -> None:
    (tmp_path / "gpunets.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    kinds, chosen = [SLNID(1e-2), NoSparsifier()], {"preserve": preserve, "precision": precision, "model": f"gpunets:{network}"}
    captured_and_eager([small(tasks_npz, sparsify=kinds[m % 2], seed=m, epochs=2, **chosen) for m in range(members)], monkeypatch)


def test_memory_that_runs_out_in_a_capture_is_freed() -> None:
    x, before = torch.zeros(2**20, device="cuda"), torch.cuda.memory_allocated()

    def work(f: int) -> Tensor:
        if f == 2 and torch.cuda.is_current_stream_capturing():
            raise torch.cuda.OutOfMemoryError("no room for member 2")
        return x + f

    with pytest.raises(torch.cuda.OutOfMemoryError, match="no room for member 2"):
        capture(lambda: side_by_side(work, 6), lambda: None, [])
    assert torch.cuda.memory_allocated() <= before + x.nbytes
    capture(lambda: side_by_side(lambda f: x + f, 6), lambda: None, []).replay()


NETWORK = """
from torch import nn
def net(outputs, input_shape):
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 20), nn.ReLU(), nn.Linear(20, outputs))
def wide(outputs, input_shape):  # cuDNN runs what has more than 64 channels
    return nn.Sequential(nn.Conv2d(1, 72, 3, padding=1), nn.ReLU(), nn.Conv2d(72, 66, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(66, 16, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(),
                         nn.Conv2d(8, 70, 1), nn.Tanh(), nn.Flatten(), nn.Linear(630, 20), nn.ReLU(), nn.Linear(20, outputs))
"""


@pytest.mark.parametrize("network", ["net", "wide"])
@pytest.mark.parametrize("members", [1, 6])
@pytest.mark.parametrize("change", [{}, {"preserve": EWC(5.0), "schedule": "cosine"}, {"layers": "all"}], ids=str)
def test_convolutions_on_a_gpu(
    tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], members: int, network: str
) -> None:
    (tmp_path / "gpunets.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    kinds = [SLNID(1e-2), NoSparsifier(), DeCov(1e-3)]
    runs = [small(tasks_npz, model=f"gpunets:{network}", sparsify=kinds[m % 3], seed=m, epochs=1, **change) for m in range(members)]
    cpu, gpu = Learner(runs), Learner(runs, device="cuda")
    cpu.learn()
    gpu.learn()
    for name, p in cpu.fleet.params.items():
        assert_close(gpu.fleet.params[name].cpu(), p, rtol=1e-2, atol=1e-3)
    for group, held in cpu.fleet.state.items():
        for name, value in held.items():
            assert_close(gpu.fleet.state[group][name].cpu(), value, rtol=2e-2, atol=1e-3)
    for name, value in cpu.fleet.alpha.items():
        assert_close(gpu.fleet.alpha[name].cpu(), value, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("preserve", [LwF(1.0), EBLL(1.0, steps=20), PackNet(0.5), MAS(0.1)], ids=str)
@pytest.mark.parametrize("sparsify", [DeCov(1e-2), SLNID(1e-2), L1Rep(1e-3)], ids=str)
def test_penalties_in_all_layers_with_crops_and_flips(
    tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preserve: Any, sparsify: Any
) -> None:
    """The fast path, with its kernels for feature maps, augmentation and held weights, trains to what a CPU does."""
    (tmp_path / "gpunets.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    chosen = {"model": "gpunets:net", "layers": "all", "augment": "crop-flip", "preserve": preserve, "sparsify": sparsify}
    runs = [small(tasks_npz, seed=m, schedule="cosine", **chosen) for m in range(2)]
    learner = Learner(runs, device="cuda")
    for there, here in zip(learner.learn(), Learner(runs).learn(), strict=True):
        losses = [[epoch["loss"] for task in result.history for epoch in task] for result in (there, here)]
        assert losses[0] == pytest.approx(losses[1], rel=5e-3)
    for name, owner in learner.fleet.state.get("owner", {}).items():
        p, frozen = learner.fleet.params[name], learner.fleet.state["anchor"][name]
        assert torch.equal(torch.where(owner > 0, p, 0.0), torch.where(owner > 0, frozen, 0.0))


@pytest.mark.parametrize("name", PRESERVE)
def test_every_preserver_trains_convolutions_in_bf16_as_on_a_cpu(
    tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "gpunets.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    kinds = [SLNID(1e-2), NoSparsifier()]
    chosen = {"preserve": PRESERVE[name], "precision": "bf16", "model": "gpunets:net"}
    runs = [small(tasks_npz, sparsify=kinds[m], seed=m, **chosen) for m in range(2)]
    cpu, gpu = Learner(runs, device="cpu").learn(), Learner(runs, device="cuda").learn()
    for there, here in zip(gpu, cpu, strict=True):
        assert there.status == here.status == "done"
        losses = [[epoch["loss"] for task in result.history for epoch in task] for result in (there, here)]
        assert losses[0] == pytest.approx(losses[1], rel=5e-3)


def test_importance_in_bf16_is_near(tasks_npz: str) -> None:
    runs = [small(tasks_npz, model="mlp-64", epochs=1, tasks=1, precision=p) for p in ("fp32", "bf16")]
    omegas = []
    for run in runs:
        learner = Learner([run], device="cuda")
        learner.learn()
        omegas.append(learner.fleet.state["omega"]["fc2.weight"])
    assert float((omegas[0] - omegas[1]).norm() / omegas[0].norm()) < 0.05


def test_members_may_differ_in_sigma_and_in_epochs(tasks_npz: str) -> None:
    runs = [small(tasks_npz, sparsify=SLNID(1e-2, sigma=1.0 + m), seed=m, epochs=1 + m, schedule="cosine") for m in range(3)]
    learner = Learner(runs, device="cuda")
    learner.learn()
    for m, run in enumerate(runs):
        alone = Learner([run], device="cuda")
        alone.learn()
        for name, p in alone.fleet.params.items():
            assert_close(learner.fleet.params[name][m], p[0], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_deterministic_runs_have_the_same_bits(tasks_npz: str, tmp_path: Path, precision: Any) -> None:
    runs = [small(tasks_npz, seed=seed, precision=precision) for seed in range(3)]
    found = [selfless.train(runs, out=tmp_path / name, device="cuda", deterministic=True) for name in ("one", "two")]
    for one, two in zip(*found, strict=True):
        first, second = (load_file(result.weights) for result in (one, two))
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_stopped_run_goes_on(tasks_npz: str, tmp_path: Path) -> None:
    runs = [small(tasks_npz, seed=s) for s in range(2)]
    want, seen = Learner(runs, device="cuda").learn(), 0

    def stop(event: Event) -> None:
        nonlocal seen
        seen += not event.passing
        if seen == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Learner(runs, device="cuda", checkpoint=tmp_path / "s.safetensors", report=stop).learn()
    again = Learner(runs, device="cuda", checkpoint=tmp_path / "s.safetensors")
    assert again.resumed
    for a, b in zip(again.learn(), want, strict=True):
        assert_allclose(a.accuracy, b.accuracy, atol=0.051)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_other_precisions_learn(tasks_npz: str, precision: Any) -> None:
    result = Learner([small(tasks_npz, epochs=6, precision=precision)], device="cuda").learn()[0]
    assert result.accuracy.diagonal().min() > 0.8
