"""A finished run goes on with new tasks: the same network as in one run, without the old data."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import selfless
from selfless import Result, Run
from selfless.trained import read_tensors

BASE: dict[str, Any] = {"model": "mlp-12", "sparsify": "slnid:1e-2", "epochs": 2, "batch": 50, "lr": 0.05}
PRESERVERS = [
    "mas",
    "mas-local",
    "ewc",
    "ewc-online",
    "si",
    "rwalk",
    "lwf",
    "ebll:1,steps=10",
    "imm",
    "packnet",
    "hat",
    "none",
    "lwf:1+mas:0.1",
]


@pytest.fixture
def parts(tasks_npz: str, tmp_path: Path) -> list[str]:
    """The stream of three tasks as two streams: the first two tasks, and the third."""
    whole = np.load(tasks_npz.removeprefix("arrays:"))
    for name, wanted in (("first", (0, 1)), ("third", (2,))):
        chosen = {
            key: array[np.isin(whole["task" if key in ("x_train", "y_train", "task") else "task_test"], wanted)]
            for key, array in whole.items()
        }
        np.savez(tmp_path / f"{name}.npz", **chosen)
    return [f"arrays:{tmp_path}/{name}.npz" for name in ("first", "third")]


def assert_same_network(one: Result, other: Result) -> None:
    a, b = read_tensors(one), read_tensors(other)
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert different == []


@pytest.mark.parametrize("preserve", PRESERVERS)
def test_two_tasks_and_then_a_third_give_the_bits_of_one_run(preserve: str, tasks_npz: str, parts: list[str], tmp_path: Path) -> None:
    one = selfless.train(Run(stream=tasks_npz, preserve=preserve, **BASE))
    first = selfless.train(Run(stream=parts[0], preserve=preserve, outputs=6, **BASE), out=tmp_path)
    both = selfless.train(first.continued(parts[1]), out=tmp_path)
    assert_same_network(one, both)
    assert both.data == one.data
    known = ~np.isnan(both.accuracy)  # the first task was not evaluated on the third
    assert known.sum() == 8
    assert np.array_equal(both.accuracy[known], one.accuracy[known])
    assert both.summary() == one.summary()
    assert (both.history, both.capacity) == (one.history, one.capacity)
