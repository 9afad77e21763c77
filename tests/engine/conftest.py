"""A small stream of one's own: three tasks of two classes each, six by six pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def tasks_npz(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make(tmp_path_factory.mktemp("data") / "tasks.npz")


def make(path: Path, per_class: int = 65) -> str:
    """130 training images a task: with batches of 50 the last one is smaller."""
    rng = np.random.Generator(np.random.PCG64(0))
    prototypes = rng.integers(0, 200, (6, 1, 6, 6))
    y = np.repeat(np.arange(6), per_class)
    x = np.clip(prototypes[y] + rng.normal(0, 60, (len(y), 1, 6, 6)), 0, 255).astype(np.uint8)
    yt = np.repeat(np.arange(6), 20)
    xt = np.clip(prototypes[yt] + rng.normal(0, 60, (len(yt), 1, 6, 6)), 0, 255).astype(np.uint8)
    np.savez(path, x_train=x, y_train=y, x_test=xt, y_test=yt, task=y // 2, task_test=yt // 2)
    return f"arrays:{path}"
