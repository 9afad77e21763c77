"""The peers' part with a stand-in for their environment, workers for real, and the peer's loop beside our closed forms."""

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
from selfless.bench.plan import Plan, Unavailable, plan
from selfless.bench.rig import made_up, mlp
from selfless.data import offer
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
def own_stream(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two small tasks in a file, which a worker process can read."""
    rng = np.random.Generator(np.random.PCG64(0))
    y = np.arange(80) % 4
    x = rng.integers(0, 256, (80, 1, 6, 6)).astype(np.uint8)
    path = tmp_path_factory.mktemp("bench") / "own.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x[:20], y_test=y[:20], task=y // 2, task_test=y[:20] // 2)
    return f"arrays:{path}"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment whose Python gives the same answer to everything."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(ANSWER)
    python.chmod(python.stat().st_mode | stat.S_IEXEC)
    (tmp_path / "avalanche_mas.py").write_text("")
    monkeypatch.setattr(peers, "PEERS", tmp_path)
    return tmp_path


def members(stream: str) -> list[Run]:
    return [Run(stream, "mlp-12", MAS(0.1), epochs=1, batch=10, seed=s) for s in range(3)]


def test_workers_share_a_fleet(own_stream: str) -> None:
    runs = members(own_stream)
    found, alone = peers.spread(runs, 2, None), peers.ours(runs, None)
    assert len(found["workers"]) == 2
    slowest = max(sum(w["training_seconds"]) + sum(w["importance_seconds"]) for w in found["workers"])
    assert found["seconds_per_task_epoch"] == pytest.approx(slowest / 2 / 3)
    assert found["accuracy"] == pytest.approx(alone["accuracy"])


def test_ratios_are_to_what_the_peer_answers(
    quick: Plan, stand_in: Path, own_stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(sparsify: Sparsifier, tasks: int) -> list[Run]:
        return [dataclasses.replace(run, sparsify=sparsify) for run in members(own_stream)]

    held = made_up(mlp(), 40)
    offer(held, data_dir=tmp_path)
    monkeypatch.setattr(peers, "_members", few)
    monkeypatch.setattr(peers, "spread", lambda runs, _, data_dir: peers.ours(runs, data_dir))  # for real: above
    monkeypatch.setattr(peers, "located", lambda *_: (tmp_path,))
    rows = list(peers.run(dataclasses.replace(quick, data_dir=tmp_path)))
    runs, fisher = rows[:11], rows[11:]
    for row in runs:
        assert row["times_its_permuted_mnist"] == pytest.approx(8.0 / row["seconds"])
    assert len(fisher) == 4
    for theirs, ours in zip(fisher[::2], fisher[1::2], strict=True):
        assert ours["times_loop"] == pytest.approx(theirs["seconds"] / ours["seconds"])


def test_what_is_missing_is_named_with_its_remedy(stand_in: Path, quick: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(Unavailable, match="selfless data fetch mnist"):
        list(peers.run(dataclasses.replace(quick, data_dir=tmp_path / "nowhere")))
    (stand_in / ".venv" / "bin" / "python").unlink()
    with pytest.raises(Unavailable, match=r"setup\.sh"):
        peers.environment()
    (stand_in / "avalanche_mas.py").unlink()
    with pytest.raises(Unavailable, match="checkout"):
        peers.environment()


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
