"""Trackers: what a loop and `selfless run --log` send is what the local store of each tracker holds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import selfless
from selfless import MAS, SLNID, Run
from selfless.cli import app
from selfless.integrations import trackers
from selfless.integrations.tracked_runs import TrackedRuns
from selfless.integrations.trackers import importance_maps, log_importance, log_keeper, open_tracker

pytestmark = pytest.mark.filterwarnings("ignore:::mlflow", "ignore:::wandb", "ignore:::sqlalchemy", "ignore::DeprecationWarning")
MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


class Memory:
    """A tracker that keeps everything in dictionaries."""

    def __init__(self, *_: Any) -> None:
        self.values: dict[tuple[str, int], float] = {}
        self.images: dict[tuple[str, int], Any] = {}
        self.closed = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.values |= {(name, step): value for name, value in values.items()}

    def log_images(self, images: Mapping[str, Any], step: int) -> None:
        self.images |= {(name, step): image for name, image in images.items()}

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: Any) -> None:
        self.closed = True


def train_a_task() -> selfless.Keeper:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    keeper = selfless.attach(model, MAS(0.1), SLNID(0.1))
    x, y = torch.randn(16, 5), torch.randint(3, (16,))
    (F.cross_entropy(model(x), y) + keeper.penalty()).backward()
    keeper.consolidate([(x, y)])
    return keeper


def test_a_loop_logs_both_penalties_capacity_and_maps() -> None:
    keeper, tracker = train_a_task(), Memory()
    log_keeper(tracker, keeper, 3, loss=0.5)
    log_importance(tracker, keeper, 3)
    assert tracker.values[("loss", 3)] == 0.5
    assert {("selfless/inhibition", 3), ("selfless/anchor", 3), ("selfless/free/neurons/0", 3)} <= tracker.values.keys()
    assert set(tracker.images) == {("omega/0.weight", 3), ("omega/2.weight", 3), ("alpha/0", 3)}
    assert tracker.images[("omega/0.weight", 3)].shape == (8, 5)


def test_a_map_is_bright_where_omega_is_large() -> None:
    omega = torch.tensor([[0.0, 1.0], [4.0, 0.25]])
    found = importance_maps({"w": omega, "b": torch.ones(3)}, {})
    assert found["omega/w"].tolist() == [[0, 127], [255, 63]]
    assert set(found) == {"omega/w"}
    assert importance_maps({"w": torch.zeros(2, 900)}, {})["omega/w"].shape == (2, trackers.WIDEST)


def test_a_run_logs_the_same_live_and_from_its_record(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Memory] = []
    monkeypatch.setitem(trackers.TRACKERS, "memory", lambda *_: found.append(Memory()) or found[-1])
    flags = ["--stream", tasks_npz, "--model", "mlp-8", "--epochs", "2", "--tasks", "2", "--sparsify", "slnid:1e-2", "--workers", "1"]
    for _ in range(2):
        done = CliRunner().invoke(app, ["run", *flags, "--out", str(tmp_path), "--log", "memory", "--json"])
        assert done.exit_code == 0, done.output
    live, recorded = found
    assert live.closed
    assert live.values == recorded.values
    assert {("train/loss", epoch) for epoch in (1, 2, 3, 4)} <= live.values.keys()
    assert {("train/inhibition", epoch) for epoch in (1, 2, 3, 4)} <= live.values.keys()
    assert {step for name, step in live.values if name == "train/anchor"} == {3, 4}  # from the second task on
    assert {
        ("accuracy/task-1", 2),
        ("accuracy/task-1", 4),
        ("accuracy/task-2", 4),
        ("free/neurons", 2),
        ("summary/average", 4),
    } <= live.values.keys()
    assert {name for name, _ in live.images} == {name for name, _ in recorded.images}
    assert any(name.startswith("omega/") for name, _ in live.images)
    assert any(name.startswith("alpha/") for name, _ in live.images)


def test_an_unknown_tracker_and_a_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no tracker 'excel'; choose one of tensorboard, wandb, mlflow"):
        TrackedRuns("excel", tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'selfless-learning\[wandb\]'"):
        open_tracker("wandb", tmp_path)


@pytest.mark.parametrize("kind", list(MODULES))
def test_the_local_store_holds_what_was_logged(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(MODULES[kind], reason=f"{kind} is not installed; make test-integrations installs it")
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    image = np.arange(12, dtype=np.uint8).reshape(3, 4)
    with open_tracker(kind, tmp_path, "mine", {"lr": 0.1}) as tracker:
        for step in (1, 2):
            tracker.log({"train/loss": 1 / step}, step)
        tracker.log_images({"omega/fc1": image}, 2)
        tracker.log({"accuracy/task-1": 0.75}, 1)  # a value of an earlier step is not lost
    READ[kind](tmp_path)


def _read_tensorboard(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "mine"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("accuracy/task-1")] == [(1, 0.75)]
    assert (events.Images("omega/fc1")[0].width, events.Images("omega/fc1")[0].height) == (4, 3)


def _read_wandb(folder: Path) -> None:
    (run,) = (folder / "wandb").glob("offline-run-*")
    (data,) = run.glob("run-*.wandb")
    # `finish` returns before wandb's service, a process of its own, has written the last of the file.
    waited_until = time.monotonic() + 60
    wanted = (b"train/loss", b"accuracy/task-1")
    while not all(name in data.read_bytes() for name in wanted) and time.monotonic() < waited_until:
        time.sleep(0.2)
    assert all(name in data.read_bytes() for name in wanted)
    assert list(run.glob("files/media/images/**/*.png"))


def _read_mlflow(folder: Path) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name(trackers.PROJECT).experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.1"}
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/loss")] == [(1, 1.0), (2, 0.5)]
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "accuracy/task-1")] == [(1, 0.75)]
    assert [os.path.splitext(p)[1] for p in os.listdir(folder / "artifacts" / run.info.run_id / "artifacts" / "images")]


READ = {"tensorboard": _read_tensorboard, "wandb": _read_wandb, "mlflow": _read_mlflow}


def test_settings_of_a_run_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setitem(trackers.TRACKERS, "memory", lambda folder, name, settings: seen.append((folder, name, settings)) or Memory())
    with TrackedRuns("memory", tmp_path) as tracked:
        tracked.tracker(Run(seed=3))
    assert seen[0][0] == tmp_path / "memory"
    assert seen[0][1].startswith(Run(seed=3).key)
    assert seen[0][2]["seed"] == "3"


class Recorder:
    """A stand-in for a library: keeps every call, and answers with itself."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self.calls.append((name, given, named))
            return None if name == "get_experiment_by_name" else self

        return self if name in ("info", "run_id") else call


@pytest.mark.parametrize(
    ("kind", "module", "wanted"),
    [
        (
            "tensorboard",
            "torch.utils.tensorboard",
            [
                ("SummaryWriter", ("F/mine",), {}),
                ("add_text", ("settings", "    lr = 0.1"), {}),
                ("add_scalar", ("loss", 0.5, 3), {}),
                ("add_image", ("omega", "picture", 3), {"dataformats": "HW"}),
                ("close", (), {}),
            ],
        ),
        (
            "wandb",
            "wandb",
            [
                (
                    "init",
                    (),
                    {"project": "selfless", "dir": "F", "name": "mine", "config": {"lr": 0.1}, "mode": "offline", "reinit": "create_new"},
                ),
                ("define_metric", ("*",), {"step_metric": "step"}),
                ("log", ({"loss": 0.5, "step": 3},), {}),
                ("Image", ("picture",), {}),
                ("log", ({"omega": None, "step": 3},), {}),
                ("finish", (), {"exit_code": 0}),
            ],
        ),
        (
            "mlflow",
            "mlflow.tracking",
            [
                ("MlflowClient", (), {"tracking_uri": "sqlite:///F/mlflow.db"}),
                ("get_experiment_by_name", ("selfless",), {}),
                ("create_experiment", ("selfless",), {"artifact_location": "file://F/artifacts"}),
                ("create_run", (None,), {"run_name": "mine"}),
                ("log_param", (None, "lr", 0.1), {}),
                ("log_metric", (None, "loss", 0.5), {"step": 3}),
                ("log_image", (None, "picture"), {"key": "omega", "step": 3}),
                ("set_terminated", (None, "FINISHED"), {}),
            ],
        ),
    ],
)
def test_calls_of_each_library(kind: str, module: str, wanted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in: which calls a tracker makes; the test above reads what the libraries themselves have written."""
    for name in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    library = Recorder()
    for name in {module, module.partition(".")[0]} - {"torch"}:
        monkeypatch.setitem(sys.modules, name, library)
    with open_tracker(kind, tmp_path, "mine", {"lr": 0.1}) as tracker:
        tracker.log({"loss": 0.5}, 3)
        tracker.log_images({"omega": "picture"}, 3)  # type: ignore[dict-item]

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        return None if value is library else value.replace(str(tmp_path), "F") if isinstance(value, str) else value

    found = [(name, tuple(plain(one) for one in given), plain(named)) for name, given, named in library.calls]
    assert found == wanted
