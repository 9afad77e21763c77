"""How often a learner saves its state."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import selfless.engine.checkpoint as checkpoint_module
from selfless import MAS, SLNID, Run
from selfless.engine.learner import Learner


def test_a_large_fleet_is_not_saved_after_every_epoch(tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves: list[Path] = []
    real = checkpoint_module.write_tensors

    def slow(path: Path, *content: Any) -> None:
        saves.append(path)
        real(path, *content)
        time.sleep(0.3)

    run = Run(stream=tasks_npz, model="mlp-12", preserve=MAS(0.1), sparsify=SLNID(1e-2), epochs=5, batch=50, lr=0.05)
    monkeypatch.setattr(checkpoint_module, "write_tensors", slow)
    Learner([run], checkpoint=tmp_path / "x.safetensors").learn()
    assert len(saves) == 1  # three tasks of five epochs take less than the six seconds that one save is to be spread over
