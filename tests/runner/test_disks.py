"""Full disks, folders that vanish, and damaged states: one message, nothing half-written, and the same command goes on."""

from __future__ import annotations

import contextlib
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.testing import assert_array_equal
from safetensors.torch import load_file

import selfless
from selfless import Run
from selfless.files import write_tensors
from selfless.runner.store import Store
from tests.runner.small_runs import BASE, stopping

pytestmark = pytest.mark.usefixtures("every_epoch_saved")


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Inside `with`: no file can be longer than `size` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def run(tasks_npz: str) -> Run:
    return Run(stream=tasks_npz, **(BASE | {"epochs": 1}))


def test_a_full_disk_leaves_the_file_of_before(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"w": torch.ones(3)}, {"key": "k"})
    with largest_file(1000), pytest.raises(OSError, match=r"cannot write .*x\.safetensors: file too large; make room"):
        write_tensors(path, {"w": torch.ones(3000)}, {})
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert load_file(path)["w"].tolist() == [1, 1, 1]


def test_a_run_on_a_full_disk_goes_on_when_there_is_room(run: Run, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        selfless.train(run, out=tmp_path, watch=stopping(after=3))
    saved = Store(tmp_path).training([run]).read_bytes()
    with largest_file(3000), pytest.raises(OSError, match=r"cannot write .*training-.*make room"):
        selfless.train(run, out=tmp_path)
    assert Store(tmp_path).training([run]).read_bytes() == saved
    assert not list(tmp_path.glob("*/.*"))
    assert_array_equal(selfless.train(run, out=tmp_path).accuracy, selfless.train(run).accuracy)


def test_a_folder_that_vanishes_is_made_again(run: Run, tmp_path: Path) -> None:
    def remove(*_: Any) -> None:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)

    assert selfless.train(run, out=tmp_path / "out", watch=remove).status == "done"
    assert selfless.train(run, out=tmp_path / "out").status == "done"


@pytest.mark.parametrize("damage", ["bit", "progress"])
def test_a_damaged_state_is_found_and_trained_again(run: Run, tmp_path: Path, damage: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        selfless.train(run, out=tmp_path, watch=stopping(after=3))
    path = Store(tmp_path).training([run])
    content = bytearray(path.read_bytes())
    if damage == "bit":
        content[-100] ^= 4  # in a tensor
    else:
        at = content.index(b"accuracy")
        content[at : at + 2000] = content[at : at + 2000].replace(b"0.", b"1.", 1)  # another number in the progress
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="cannot be continued"):
        again = selfless.train(run, out=tmp_path)
    assert_array_equal(again.accuracy, selfless.train(run).accuracy)
