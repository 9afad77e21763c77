"""One thread for torch, a small stream for all tests, and the fixtures of the data tests."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import hypothesis
import numpy as np
import pytest

from tests.warm import WarmProcess

hypothesis.settings.register_profile("here", deadline=None)  # a machine that pauses is no fault of the code
hypothesis.settings.load_profile("here")


def pytest_configure(config: pytest.Config) -> None:
    """Where tests run: one thread for torch, and the fixtures of the data tests."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # this process divides the tests among the workers; it does not need torch
    import torch

    torch.set_num_threads(1)  # pytest runs one worker per core; more threads would slow all of them down
    config.pluginmanager.import_plugin("tests.data.fixtures")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with slow tests, so that the workers of pytest-xdist end at about the same time."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def tasks_npz(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small stream: three tasks of two classes each, six by six pixels.

    A task has 130 training images: with batches of 50 the last one is smaller.
    """
    from selfless.testing import small_arrays

    path = tmp_path_factory.mktemp("data") / "tasks.npz"
    np.savez(path, **small_arrays())  # type: ignore[arg-type]
    return f"arrays:{path}"


@pytest.fixture
def warm_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the worker processes of this test as forks of a process that has imported torch."""
    cold: Any = subprocess.Popen

    def start(command: Any, **options: Any) -> Any:
        return (WarmProcess if list(command[:2]) == [sys.executable, "-m"] else cold)(command, **options)

    monkeypatch.setattr(subprocess, "Popen", start)


@pytest.fixture
def every_epoch_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a run is written after each epoch, however short; else a test of resuming depends on the speed of the machine."""
    monkeypatch.setattr("selfless.engine.checkpoint.SAVING", float("inf"))
