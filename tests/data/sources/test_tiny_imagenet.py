"""The published formats, whole and malformed: whatever is not as published is refused with the file's name."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from published import cifar_contents, idx_bytes, mnist_contents, tiny_contents, write_tar, write_zip

from selfless.data import Altered, DataError, MissingData, cache_dir, fetch, load, verify
from selfless.data import archives as archives_module
from selfless.data.checksums import gunzip
from selfless.data.sources import cifar, tiny_imagenet
from selfless.data.sources import mnist as idx


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


def test_five_seeds_share_one_copy(tmp_path: Path, put_mnist: Callable[[Path], Path]) -> None:
    root = put_mnist(tmp_path / "a")
    first = load("mnist", data_dir=root)
    assert load("mnist", data_dir=root) is first


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_mnist_is_never_used(damage: str, tmp_path: Path, put_mnist: Callable[[Path], Path]) -> None:
    path = put_mnist(tmp_path / "a") / "mnist" / "train-images-idx3-ubyte.gz"
    data = path.read_bytes()
    flipped = gzip.compress(bytes([*gzip.decompress(data)[:-1], gzip.decompress(data)[-1] ^ 1]))
    path.write_bytes({"truncated": data[:-20], "flipped": flipped, "empty": b""}[damage])
    with pytest.raises(Altered, match=r"train-images-idx3-ubyte\.gz"):
        load("mnist", data_dir=tmp_path / "a")
    assert verify("mnist", data_dir=tmp_path / "a")[0].status == "altered"


def test_a_whole_copy_elsewhere_is_used_instead(tmp_path: Path, put_mnist: Callable[[Path], Path]) -> None:
    put_mnist(cache_dir() / "data")
    damaged = put_mnist(tmp_path / "a") / "mnist" / "t10k-labels-idx1-ubyte.gz"
    damaged.write_bytes(b"half")
    assert len(load("mnist", data_dir=tmp_path / "a").train[1]) == 60


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
        idx.parse(data, "file")


def test_idx_pairs_must_agree() -> None:
    images, labels = idx_bytes(np.zeros((3, 2, 2))), idx_bytes(np.array([0, 1, 10]))
    with pytest.raises(Altered, match="label 10 is out of range"):
        idx.pair(images, labels, 10, "x")
    with pytest.raises(Altered, match="do not belong together"):
        idx.pair(images, idx_bytes(np.zeros(2)), 10, "x")


def test_gunzip_reports_truncation() -> None:
    with pytest.raises(Altered, match="half-written"):
        gunzip(gzip.compress(b"x" * 1000)[:-9], "file")


@pytest.mark.parametrize("form", ["cifar-100-binary.tar.gz", "cifar-100-binary.tar.xz", "cifar-100-binary"])
def test_cifar_in_every_wrapping(form: str, tmp_path: Path, small_cifar: dict[str, bytes]) -> None:
    if "tar" in form:
        write_tar(tmp_path / form, small_cifar)
    else:
        (tmp_path / form).mkdir()
        for name, data in small_cifar.items():
            (tmp_path / form / name).write_bytes(data)
    source = load("cifar-100", data_dir=tmp_path)
    records = np.frombuffer(small_cifar["train.bin"], np.uint8).reshape(-1, 3074)
    assert np.array_equal(source.train[0].numpy().reshape(200, -1), records[:, 2:])
    assert source.train[1].tolist() == [i % 100 for i in range(200)]
    assert source.classes[:2] == ("class00", "class01")
    assert source.mean is not None


def test_cifar_is_unpacked_once(tmp_path: Path, small_cifar: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar(tmp_path / "cifar-100-binary.tar.xz", small_cifar)
    cifar.read(tmp_path)
    unpack = archives_module.untar
    monkeypatch.setattr(cifar, "untar", lambda *a: pytest.fail("unpacked again"))
    cifar.read(tmp_path)
    monkeypatch.setattr(cifar, "untar", unpack)
    cached = cache_dir() / "unpacked" / "cifar-100-binary" / "train.bin"
    cached.write_bytes(cached.read_bytes()[:-1])
    assert len(cifar.read(tmp_path)[0][1]) == 200, "a damaged cache is unpacked again"
    assert not list(cached.parent.glob(".making-*"))


def test_cifar_refuses_what_is_not_published(tmp_path: Path, small_cifar: dict[str, bytes]) -> None:
    archive = tmp_path / "cifar-100-binary.tar.gz"
    write_tar(archive, {**small_cifar, "test.bin": small_cifar["train.bin"][::-1]})
    with pytest.raises(Altered, match=r"test\.bin is not the published file"):
        load("cifar-100", data_dir=tmp_path)
    write_tar(archive, small_cifar)
    archive.write_bytes(archive.read_bytes()[:5000])
    assert verify("cifar-100", data_dir=tmp_path)[0].status == "altered"


@pytest.mark.parametrize(
    ("top", "link", "message"),
    [("../", None, "leads out"), ("/tmp/", None, "leads out"), ("cifar-100-binary/", "test.bin", "not a regular file")],
)
def test_tar_paths_are_checked(top: str, link: str | None, message: str, tmp_path: Path, small_cifar: dict[str, bytes]) -> None:
    write_tar(tmp_path / "cifar-100-binary.tar.gz", small_cifar, top, link)
    with pytest.raises(DataError, match=message):
        load("cifar-100", data_dir=tmp_path)


def test_cifar_records_malformed() -> None:
    data = bytearray(cifar_contents(1)["test.bin"])
    with pytest.raises(Altered, match="cut off"):
        cifar.records(bytes(data[:-1]), "x")
    data[1] = 100
    with pytest.raises(Altered, match="label out of range"):
        cifar.records(bytes(data), "x")


@pytest.mark.parametrize("zipped", [True, False])
def test_tiny_imagenet(zipped: bool, tmp_path: Path) -> None:
    contents = tiny_contents()
    if zipped:
        write_zip(tmp_path / "tiny-imagenet-200.zip", contents)
    else:
        for name, data in contents.items():
            path = tmp_path / "tiny-imagenet-200" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    source = load("tiny-imagenet", data_dir=tmp_path)
    assert source.train[0].shape == (12, 3, 64, 64)
    assert source.test[0].shape == (8, 3, 64, 64)
    assert source.train[1].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert source.test[1].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert source.classes[1] == "thing 1"
    grey = source.train[0][0]
    assert torch.equal(grey[0], grey[1]), "greyscale becomes RGB"
    assert source.reduced is not None
    assert source.reduced.startswith("reduced: 3 of 500 training and 2 of 50 test")
    assert source.notes[0].startswith("tiny-imagenet is reduced")


def test_the_whole_set_comes_before_a_reduced_one(tmp_path: Path) -> None:
    write_zip(tmp_path / "tiny-imagenet-200-mini.zip", tiny_contents(train=1))
    write_zip(cache_dir() / "data" / "tiny-imagenet-200.zip", tiny_contents(train=2))
    assert len(load("tiny-imagenet", data_dir=tmp_path).train[1]) == 8
    with pytest.raises(MissingData, match=r"tiny-imagenet-200\.zip is reduced"):
        fetch("tiny-imagenet", data_dir=tmp_path)


def test_a_whole_tiny_imagenet_is_not_called_reduced() -> None:
    train, test = tuple(range(200)) * 500, tuple(range(200)) * 50
    assert tiny_imagenet.reduction(train, test, 200) is None
    some = tiny_imagenet.reduction(train[:-1], test, 200)
    assert some == "reduced: 499 to 500 of 500 training images a class"


def test_decoded_images_are_cached_and_an_altered_cache_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_zip(tmp_path / "tiny-imagenet-200-mini.zip", tiny_contents())
    before = tiny_imagenet.read(tmp_path)[0][0][0].copy()
    (array,) = (cache_dir() / "decoded").glob("*.npy")
    data = bytearray(array.read_bytes())
    data[-5] ^= 255
    array.write_bytes(data)
    assert np.array_equal(tiny_imagenet.read(tmp_path)[0][0][0], before), "decoded again"
    monkeypatch.setattr("selfless.data.images._decode_into", lambda *a: pytest.fail("decoded again"))
    assert np.array_equal(tiny_imagenet.read(tmp_path)[0][0][0], before)
    note = array.with_suffix(".json")
    note.write_text(json.dumps({**json.loads(note.read_text()), "time": 0}))  # as after copying a cache
    assert np.array_equal(tiny_imagenet.read(tmp_path)[0][0][0], before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"../../evil.JPEG": b"x"}, "leads out"),
        ({"train/n00000001/images/n00000001_0.JPEG": b"not a jpeg"}, "not a readable image"),
        ({"val/val_annotations.txt": b"val_0.JPEG\tn99999999\t0\t0\t1\t1\n"}, "wnids.txt does not name"),
        ({"wnids.txt": b"n00000000\n"}, "wnids.txt does not name"),
    ],
)
def test_tiny_imagenet_malformed(change: dict[str, bytes], message: str, tmp_path: Path) -> None:
    write_zip(tmp_path / "tiny-imagenet-200.zip", {**tiny_contents(), **change})
    with pytest.raises(DataError, match=message):
        load("tiny-imagenet", data_dir=tmp_path)
    assert not list((cache_dir() / "decoded").glob("*")), "nothing half-made is left"


def test_a_truncated_or_damaged_zip_is_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "tiny-imagenet-200.zip", tiny_contents())
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(Altered, match="half-written"):
        load("tiny-imagenet", data_dir=tmp_path)
    at = data.index(b"\xff\xd8") + 300  # within the first JPEG: the CRC notices
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert verify("tiny-imagenet", data_dir=tmp_path)[0].status == "altered"


def test_absent_data_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(MissingData) as error:
        load("cifar-100", data_dir=tmp_path, download=False)
    assert f"Put this file into {tmp_path}" in str(error.value)
    assert "cifar-100-binary.tar.gz" in str(error.value)
    with pytest.raises(ValueError, match=r"did you mean 'cifar-100'\?.*known: mnist"):
        load("cifar100")
