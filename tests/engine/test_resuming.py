"""A run that stops and goes on ends with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.testing import assert_array_equal

from selfless import (
    EBLL,
    HAT,
    IMM,
    SI,
    LwF,
    PackNet,
    RWalk,
)
from selfless.engine.learner import Learner
from selfless.engine.progress import Event
from tests.engine.small_runs import small


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"select": "held-out", "schedule": "cosine"},
        {"schedule": "plateau"},
        {"preserve": SI(1.0)},
        {"preserve": LwF(1.0, warmup=1)},
        {"preserve": EBLL(1.0, steps=10)},
        {"preserve": IMM(0.1)},
        {"preserve": IMM(0.1, drop=0.3)},
        {"preserve": RWalk(1.0)},
        {"preserve": HAT(0.1)},
        {"preserve": PackNet(0.5, retrain=0.5)},
        {"preserve": PackNet(0.5, retrain=0.5), "select": "held-out"},
        {"model": "mlp-12-lwta"},
    ],
    ids=str,
)
def test_a_stopped_run_ends_with_the_same_bits(tasks_npz: str, tmp_path: Path, after: int, change: dict[str, Any]) -> None:
    runs = [small(tasks_npz, seed=s, **change) for s in range(2 if after % 2 else 1)]
    whole = Learner(runs)
    want = whole.learn()
    file = tmp_path / "state.safetensors"
    count = 0

    def stop(event: Event) -> None:
        nonlocal count
        count += 1
        if count == after:
            raise Stop

    with pytest.raises(Stop):
        Learner(runs, checkpoint=file, report=stop).learn()
    again = Learner(runs, checkpoint=file)
    assert again.resumed
    got = again.learn()
    for a, b in zip(got, want, strict=True):
        assert_array_equal(a.accuracy, b.accuracy)
        assert a.as_dict()["held_out"] == b.as_dict()["held_out"]
        assert a.history == b.history
        assert a.capacity == b.capacity
    for name, p in whole.fleet.tensors().items():
        assert torch.equal(again.fleet.tensors()[name], p), name
