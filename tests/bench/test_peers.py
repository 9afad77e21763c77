"""The part "peers" with a fake environment, real worker processes, and the peer's loop over samples beside our closed forms."""

from __future__ import annotations

import dataclasses
import importlib.util
import stat
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from selfless import importance
from selfless.bench import peers
from selfless.bench.engine import mlp, synthetic_source
from selfless.bench.plan import Plan, Unavailable, plan
from selfless.bench.processes import time_fleet, time_split_fleet
from selfless.data import Entry, offer
from selfless.preserve import MAS
from selfless.sparsify import Sparsifier
from selfless.spec import Run

ANSWER = """#!/bin/sh
echo '{"seconds_per_task_epoch": 8.0, "training_seconds_per_epoch": 5.0, "importance_seconds_per_task": 3.0,
 "average_accuracy": 0.9, "seconds_per_sample": 0.001}' | tr -d '\\n'
"""


@pytest.fixture
def quick() -> Plan:
    return plan(torch.device("cpu"), quick=True)


@pytest.fixture(scope="module")
def custom_stream(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two small tasks in a file, so that worker processes can read them."""
    rng = np.random.Generator(np.random.PCG64(0))
    y = np.arange(80) % 4
    x = rng.integers(0, 256, (80, 1, 6, 6)).astype(np.uint8)
    path = tmp_path_factory.mktemp("bench") / "custom.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x[:20], y_test=y[:20], task=y // 2, task_test=y[:20] // 2)
    return f"arrays:{path}"


@pytest.fixture
def fake_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment whose Python prints the same answer for every script."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(ANSWER)
    python.chmod(python.stat().st_mode | stat.S_IEXEC)
    (tmp_path / "avalanche_mas.py").write_text("")
    monkeypatch.setattr(peers, "PEERS", tmp_path)
    return tmp_path


def members(stream: str) -> list[Run]:
    return [Run(stream, "mlp-12", MAS(0.1), epochs=1, batch=10, seed=s) for s in range(3)]


@pytest.mark.whole
@pytest.mark.usefixtures("warm_workers")
def test_workers_share_a_fleet(custom_stream: str) -> None:
    runs = members(custom_stream)
    found, alone = time_split_fleet(runs, 2, None), time_fleet(runs, None)
    assert len(found["workers"]) == 2
    slowest = max(sum(w["training_seconds"]) + sum(w["importance_seconds"]) for w in found["workers"])
    assert found["seconds_per_task_epoch"] == pytest.approx(slowest / 2 / 3)
    assert found["accuracy"] == pytest.approx(alone["accuracy"])


@pytest.mark.slow
def test_ratios_are_to_what_the_peer_answers(
    quick: Plan, fake_environment: Path, custom_stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def three_runs(sparsify: Sparsifier, tasks: int) -> list[Run]:
        return [dataclasses.replace(run, sparsify=sparsify) for run in members(custom_stream)]

    source = synthetic_source(mlp(), 40)
    offer(source, data_dir=tmp_path)
    monkeypatch.setattr(peers, "make_runs", three_runs)
    monkeypatch.setattr(peers, "time_split_fleet", lambda runs, _, data_dir: time_fleet(runs, data_dir))  # the test above has real workers
    monkeypatch.setattr(Entry, "find", lambda *_: (tmp_path,))
    rows = list(peers.run(dataclasses.replace(quick, data_dir=tmp_path)))
    runs, fisher = rows[:11], rows[11:]
    for row in runs:
        assert row["times_its_permuted_mnist"] == pytest.approx(8.0 / row["seconds"])
    assert len(fisher) == 4
    for theirs, ours in zip(fisher[::2], fisher[1::2], strict=True):
        assert ours["times_loop"] == pytest.approx(theirs["seconds"] / ours["seconds"])


def test_what_is_missing_is_named_with_its_remedy(
    fake_environment: Path, quick: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(Unavailable, match="selfless data fetch mnist"):
        list(peers.run(dataclasses.replace(quick, data_dir=tmp_path / "nowhere")))
    (fake_environment / ".venv" / "bin" / "python").unlink()
    with pytest.raises(Unavailable, match=r"setup\.sh"):
        peers.find_environment()
    (fake_environment / "avalanche_mas.py").unlink()
    with pytest.raises(Unavailable, match="checkout"):
        peers.find_environment()


@pytest.mark.parametrize(("labels", "fisher"), [("true", "empirical"), ("all", "exact")])
def test_the_loop_over_samples_computes_what_we_do(labels: str, fisher: str) -> None:
    script = _load(Path(__file__).parents[2] / "benchmarks" / "peers" / "per_sample_fisher.py")
    torch.manual_seed(0)
    model, x, y = script.mlp(16), torch.rand(12, 784), torch.randint(10, (12,))
    looped = script.fisher(model, DataLoader(TensorDataset(x, y), batch_size=1), labels)
    ours = importance.ewc(model, [(x, y)], fisher=fisher)  # type: ignore[arg-type]
    for name, value in looped.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-7)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
