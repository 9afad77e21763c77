"""A trained run for the tests of predictions and files."""

from __future__ import annotations

from pathlib import Path

import pytest

import selfless
from selfless import Run


@pytest.fixture(scope="session")
def recorded(tasks_npz: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of PackNet over three tasks of two classes each."""
    out = tmp_path_factory.mktemp("recorded")
    run = Run(stream=tasks_npz, model="mlp-12", preserve="packnet", epochs=5, batch=20, lr=0.1)
    selfless.train(run, out=out)
    return out / run.key
