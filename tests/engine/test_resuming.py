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
    MAS,
    SGP,
    SI,
    SLNID,
    DeCov,
    DERpp,
    LwF,
    PackNet,
    Run,
    RWalk,
)
from selfless.engine.learner import Learner
from selfless.engine.progress import Event
from tests.engine.small_runs import small

pytestmark = pytest.mark.usefixtures("every_epoch_saved")


class Stop(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("members", "afters", "change"),
    [  # a task has three events: two epochs and an evaluation
        (2, (1, 2, 3, 4, 5), {}),
        (1, (2,), {"select": "held-out", "schedule": "cosine"}),
        (2, (1, 4), {"schedule": "step"}),
        (2, (4,), {"schedule": "plateau"}),
        (1, (4,), {"preserve": SI(1.0)}),
        (2, (4,), {"preserve": LwF(1.0, warmup=1)}),
        (1, (5,), {"preserve": EBLL(1.0, steps=10)}),
        (2, (3,), {"preserve": IMM(0.1)}),
        (1, (4,), {"preserve": IMM(0.1, drop=0.3)}),
        (2, (5,), {"preserve": RWalk(1.0)}),
        (1, (4,), {"preserve": HAT(0.1)}),
        (2, (4,), {"preserve": HAT(0.1), "select": "held-out"}),
        (2, (4,), {"preserve": PackNet(0.5, retrain=0.5)}),
        (1, (5,), {"preserve": PackNet(0.5, retrain=0.5), "select": "held-out"}),
        (2, (4,), {"preserve": SGP(0.8, samples=30)}),
        (2, (4,), {"preserve": DERpp(0.5, samples=20, batch=10)}),
        (2, (1,), {"model": "mlp-12-lwta"}),
        (2, (4,), {"optimizer": "adam"}),
        (1, (5,), {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "plateau"}),
        (2, (4,), {"preserve": LwF(1.0) + MAS(0.1), "sparsify": SLNID(1e-2) + DeCov(1e-2)}),
    ],
    ids=str,
)
def test_a_stopped_run_ends_with_the_same_bits(
    tasks_npz: str, tmp_path: Path, members: int, afters: tuple[int, ...], change: dict[str, Any]
) -> None:
    runs = [small(tasks_npz, seed=s, **change) for s in range(members)]
    whole = Learner(runs)
    want = whole.learn()
    for after in afters:
        again = resumed(runs, tmp_path / f"{after}.safetensors", after)
        for a, b in zip(again.learn(), want, strict=True):
            assert_array_equal(a.accuracy, b.accuracy)
            assert a.as_dict()["held_out"] == b.as_dict()["held_out"]
            assert a.history == b.history
            assert a.capacity == b.capacity
        for name, p in whole.fleet.tensors().items():
            assert torch.equal(again.fleet.tensors()[name], p), (after, name)


def resumed(runs: list[Run], file: Path, after: int) -> Learner:
    """A learner that goes on where another stopped, after so many events."""
    count = 0

    def stop(event: Event) -> None:
        nonlocal count
        count += not event.passing
        if count == after and not event.passing:
            raise Stop

    with pytest.raises(Stop):
        Learner(runs, checkpoint=file, report=stop).learn()
    again = Learner(runs, checkpoint=file)
    assert again.resumed
    return again
