"""MNIST and the IDX format: a file that is not as published is refused, and its name is in the message."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from selfless.data import Altered, load, verify
from selfless.data.checksums import gunzip
from selfless.data.sources import mnist
from tests.data.published import idx_bytes, mnist_contents


def test_mnist_loads_packed_and_unpacked(tmp_path: Path, put_mnist: Callable[[Path], Path]) -> None:
    packed = load("mnist", data_dir=put_mnist(tmp_path / "a"))
    raw = tmp_path / "b" / "mnist"
    raw.mkdir(parents=True)
    for name, content in mnist_contents().items():
        (raw / name.replace("-idx", ".idx")).write_bytes(content)
    unpacked = load("mnist", data_dir=tmp_path / "b")
    assert packed.train[0].shape == (60, 1, 28, 28)
    assert packed.train[0].dtype == torch.uint8
    assert packed.test[1].tolist() == [i % 10 for i in range(20)]
    assert torch.equal(packed.train[0], unpacked.train[0])
    assert packed.mean is None
    assert packed.reduced is None


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_mnist_is_never_used(damage: str, tmp_path: Path, put_mnist: Callable[[Path], Path]) -> None:
    path = put_mnist(tmp_path / "a") / "mnist" / "train-images-idx3-ubyte.gz"
    data = path.read_bytes()
    flipped = gzip.compress(bytes([*gzip.decompress(data)[:-1], gzip.decompress(data)[-1] ^ 1]))
    path.write_bytes({"truncated": data[:-20], "flipped": flipped, "empty": b""}[damage])
    with pytest.raises(Altered, match=r"train-images-idx3-ubyte\.gz"):
        load("mnist", data_dir=tmp_path / "a")
    assert verify("mnist", data_dir=tmp_path / "a")[0].status == "altered"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "magic missing"),
        (b"\x00\x00\x0d\x03" + bytes(12), "magic 00000d03"),
        (b"\x00\x00\x08\x03" + bytes(3), "cut off"),
        (idx_bytes(np.zeros((3, 2, 2)))[:-1], "should hold 12 values and holds 11"),
        (idx_bytes(np.zeros((3, 2, 2))) + b"x", "holds 13"),
    ],
)
def test_idx_malformed(data: bytes, message: str) -> None:
    with pytest.raises(Altered, match=message):
        mnist.parse(data, "file")


def test_idx_pairs_must_agree() -> None:
    images, labels = idx_bytes(np.zeros((3, 2, 2))), idx_bytes(np.array([0, 1, 10]))
    with pytest.raises(Altered, match="label 10 is out of range"):
        mnist.pair(images, labels, 10, "x")
    with pytest.raises(Altered, match="do not belong together"):
        mnist.pair(images, idx_bytes(np.zeros(2)), 10, "x")


def test_gunzip_reports_truncation() -> None:
    with pytest.raises(Altered, match="half-written"):
        gunzip(gzip.compress(b"x" * 1000)[:-9], "file")
