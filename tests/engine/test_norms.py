"""Batch norm on stacked parameters, beside the module itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.testing import assert_close

from selfless import MAS, SLNID, DeCov, LwF
from selfless.engine.learner import Learner
from selfless.engine.native.forward import forward, is_native
from selfless.engine.native.norms import is_plain_norm
from selfless.engine.native.options import ForwardOptions
from tests.engine.small_runs import on_gpu, small

NETWORK = """
from torch import nn

def net(outputs, input_shape, running=True):
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, track_running_stats=running), nn.ReLU(), nn.Flatten(),
                         nn.Linear(64, 8), nn.BatchNorm1d(8, affine=False, track_running_stats=running), nn.ReLU(), nn.Linear(8, outputs))
"""


def nets(running: bool, members: int = 3) -> list[nn.Sequential]:
    """Networks with batch norm after a convolution and after a linear layer; each has other weights and other running statistics."""
    found = []
    for m in range(members):
        torch.manual_seed(m)
        net = nn.Sequential(
            nn.Conv2d(2, 3, 3),
            nn.BatchNorm2d(3, track_running_stats=running),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(27, 4),
            nn.BatchNorm1d(4, momentum=0.3, affine=False, track_running_stats=running),
            nn.Linear(4, 2),
        )
        with torch.no_grad():
            for t in net.parameters():
                t.add_(0.1 * torch.randn_like(t))
        net.train()(torch.randn(9, 2, 5, 5))
        found.append(net)
    return found


def stacked(named: list[dict[str, Tensor]], grad: bool = False) -> dict[str, Tensor]:
    return {n: torch.stack([one[n].detach() for one in named]).requires_grad_(grad) for n in named[0]}


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_outputs_gradients_and_running_statistics_are_those_of_each_module(running: bool, trains: bool) -> None:
    modules = nets(running)
    params = stacked([dict(net.named_parameters()) for net in modules], grad=True)
    buffers = stacked([dict(net.named_buffers()) for net in modules])
    x = torch.randn(3, 6, 2, 5, 5, generator=torch.Generator().manual_seed(9))
    template = copy.deepcopy(modules[0]).train(trains)
    assert is_native(template)
    with torch.enable_grad():
        y = forward(template, params, x, ForwardOptions(buffers=buffers))
    y.square().sum().backward()
    for m, net in enumerate(modules):
        want = net.train(trains)(x[m])
        assert_close(y[m], want)
        net.zero_grad()
        want.square().sum().backward()
        for name, p in net.named_parameters():
            grad = params[name].grad
            assert grad is not None
            assert_close(grad[m], p.grad, rtol=1e-4, atol=1e-5)
        for name, b in net.named_buffers():
            assert_close(buffers[name][m], b)


def test_means_over_all_steps_are_left_to_the_module() -> None:
    assert not is_plain_norm(nn.BatchNorm2d(3, momentum=None))  # type: ignore[arg-type]  # torch documents None
    assert is_plain_norm(nn.BatchNorm2d(3, momentum=None, track_running_stats=False))  # type: ignore[arg-type]
    assert not is_plain_norm(nn.SyncBatchNorm(3))
    assert not is_plain_norm(nn.LayerNorm(3))


def test_statistics_that_are_no_longer_tracked_stay_as_they_are() -> None:
    """`track_running_stats = False` after construction: training uses the batch, evaluation the statistics of before."""
    modules = nets(running=True)
    for net in modules:
        for layer in (net[1], net[5]):
            layer.track_running_stats = False  # type: ignore[assignment]
    params, buffers = (stacked([dict(getattr(net, f"named_{kind}")()) for net in modules]) for kind in ("parameters", "buffers"))
    x = torch.randn(3, 6, 2, 5, 5, generator=torch.Generator().manual_seed(9))
    for trains in (True, False):
        y = forward(copy.deepcopy(modules[0]).train(trains), params, x, ForwardOptions(buffers=buffers))
        for m, net in enumerate(modules):
            assert_close(y[m], net.train(trains)(x[m]))
            for name, b in net.named_buffers():
                assert_close(buffers[name][m], b)


def test_layers_that_only_the_module_can_run_are_left_to_it() -> None:
    def net() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))

    pruned, hooked, before = net(), net(), net()
    prune.random_unstructured(pruned[1], "weight", 0.5)  # type: ignore[no-untyped-call]
    hooked[1].register_forward_hook(lambda _m, _i, output: 2 * output)
    before.register_forward_pre_hook(lambda _m, inputs: (2 * inputs[0],))
    assert is_native(net())
    assert not any(map(is_native, (pruned, hooked, before)))


METHODS = [(MAS(0.1, estimator="per-batch"), SLNID(1e-2)), (LwF(0.5), DeCov(1e-2))]


@pytest.mark.slow
@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize(("preserve", "sparsify"), METHODS, ids=str)
def test_a_member_of_a_fleet_is_the_run_alone(
    tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: bool, preserve: Any, sparsify: Any
) -> None:
    runs = normed_runs(tasks_npz, tmp_path, monkeypatch, running, preserve=preserve, sparsify=sparsify)
    together = Learner(runs)
    together.learn()
    assert together.fleet.stack.native
    alone = Learner(runs[1:2])
    alone.learn()
    assert alone.fleet.stack.bound  # the module itself
    for group in ("params", "buffers"):
        for name, t in getattr(alone.fleet, group).items():
            assert_close(getattr(together.fleet, group)[name][1], t[0], rtol=1e-3, atol=1e-4)
    for name, alpha in alone.fleet.alpha.items():
        assert_close(together.fleet.alpha[name][1], alpha[0], rtol=1e-2, atol=1e-3)


@on_gpu
@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize(("preserve", "sparsify"), METHODS, ids=str)
@pytest.mark.parametrize("members", [1, 3])
def test_a_gpu_captures_it(
    tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: bool, preserve: Any, sparsify: Any, members: int
) -> None:
    runs = normed_runs(tasks_npz, tmp_path, monkeypatch, running, preserve=preserve, sparsify=sparsify, precision="fp32")[:members]
    cpu, gpu = Learner(runs), Learner(runs, device="cuda")
    cpu.learn()
    gpu.learn()
    assert gpu.fleet.graphs
    for group in ("params", "buffers"):
        for name, t in getattr(cpu.fleet, group).items():
            assert_close(getattr(gpu.fleet, group)[name].cpu(), t, rtol=1e-2, atol=1e-3)


def normed_runs(data: str, folder: Path, monkeypatch: pytest.MonkeyPatch, running: bool, **changes: Any) -> list[Any]:
    """Return three runs of a network with batch norm."""
    (folder / "normednets.py").write_text(NETWORK)
    monkeypatch.chdir(folder)
    settings = {"model": "normednets:net", "model_options": {"running": running}, "layers": "all", "epochs": 1, "tasks": 2}
    return [small(data, seed=s, **settings, **changes) for s in range(3)]
