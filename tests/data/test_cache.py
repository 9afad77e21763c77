"""A data set is loaded once, shared while it is in use, and kept inside `with holding():`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from selfless.data import MissingData, cache_dir, holding, load
from selfless.data.cache import hold


class Loaded:
    pass


@pytest.mark.slow
def test_a_data_set_stays_loaded_until_the_outermost_block_ends() -> None:
    with holding():
        with holding():
            kept = weakref.ref(hold(Loaded()))
        gc.collect()
        assert kept() is not None
    gc.collect()
    assert kept() is None


def test_nothing_is_kept_outside_a_block() -> None:
    kept = weakref.ref(hold(Loaded()))
    gc.collect()
    assert kept() is None


def test_five_seeds_share_one_copy(tmp_path: Path, put_mnist: Callable[[Path], Path]) -> None:
    root = put_mnist(tmp_path / "a")
    first = load("mnist", data_dir=root)
    assert load("mnist", data_dir=root) is first


def test_a_whole_copy_elsewhere_is_used_instead(tmp_path: Path, put_mnist: Callable[[Path], Path]) -> None:
    put_mnist(cache_dir() / "data")
    damaged = put_mnist(tmp_path / "a") / "mnist" / "t10k-labels-idx1-ubyte.gz"
    damaged.write_bytes(b"half")
    assert len(load("mnist", data_dir=tmp_path / "a").train[1]) == 60


def test_absent_data_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(MissingData) as error:
        load("cifar-100", data_dir=tmp_path, download=False)
    assert f"Put this file into {tmp_path}" in str(error.value)
    assert "cifar-100-binary.tar.gz" in str(error.value)
    with pytest.raises(ValueError, match=r"did you mean 'cifar-100'\?.*known: mnist"):
        load("cifar100")
