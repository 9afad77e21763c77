"""The same numbers on a GPU: recorded steps, fleets, resuming. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from torch.testing import assert_close

from selfless import EWC, MAS, SI, SLNID, DeCov, NoSparsifier, Run
from selfless.engine.learner import Event, Learner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def small(data: str, **changes: Any) -> Run:
    base = {"stream": data, "model": "mlp-12", "preserve": MAS(0.1), "sparsify": SLNID(1e-2), "epochs": 2, "batch": 50, "lr": 0.05}
    return Run(**(base | {"precision": "fp32"} | changes))


@pytest.mark.parametrize(
    "change",
    [{}, {"preserve": EWC(5.0)}, {"preserve": SI(1.0)}, {"schedule": "cosine"}, {"augment": "crop-flip"}, {"model": "mlp-12-maxout"}],
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


def test_a_stopped_run_goes_on(tasks_npz: str, tmp_path: Path) -> None:
    runs = [small(tasks_npz, seed=s) for s in range(2)]
    want, seen = Learner(runs, device="cuda").learn(), 0

    def stop(event: Event) -> None:
        nonlocal seen
        seen += 1
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
