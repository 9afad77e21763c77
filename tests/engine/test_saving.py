"""How often a learner saves its state."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import selfless.engine.checkpoint as checkpoint_module
from selfless import MAS, SLNID, Run
from selfless.engine.learner import Learner
from selfless.engine.progress import Event


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


@pytest.mark.parametrize(("longest", "every"), [(600.0, 20), (5.0, 5)])
def test_saving_takes_a_twentieth_of_the_time(
    longest: float, every: int, tasks_npz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which an epoch takes a second and saving takes one too: every twentieth epoch is saved, or after the longest time."""
    clock, saved = [0.0], list[float]()

    def write(*_: Any) -> None:
        clock[0] += 1
        saved.append(clock[0])

    def report(event: Event) -> None:
        clock[0] += not event.passing

    monkeypatch.setattr(checkpoint_module, "write_tensors", write)
    monkeypatch.setattr(checkpoint_module, "LONGEST", longest)
    monkeypatch.setattr(checkpoint_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    run = Run(stream=tasks_npz, model="mlp-12", preserve=MAS(0.1), sparsify=SLNID(1e-2), epochs=40, batch=50, lr=0.05)
    Learner([run], checkpoint=tmp_path / "x.safetensors", report=report).learn()
    assert {late - early for early, late in pairwise(saved)} == {every + 1.0}
