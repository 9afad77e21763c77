"""Tiny ImageNet, zipped and unpacked, whole and reduced; the cache of decoded images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from selfless.data import Altered, DataError, MissingData, cache_dir, fetch, load, verify
from selfless.data.sources import tiny_imagenet
from tests.data.published import tiny_contents, write_zip


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
    assert tiny_imagenet.describe_reduction(train, test, 200) is None
    some = tiny_imagenet.describe_reduction(train[:-1], test, 200)
    assert some == "reduced: 499 to 500 of 500 training images a class"


def test_decoded_images_are_cached_and_an_altered_cache_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_zip(tmp_path / "tiny-imagenet-200-mini.zip", tiny_contents())
    before = tiny_imagenet.read_images(tmp_path)[0][0][0].copy()
    (array,) = (cache_dir() / "decoded").glob("*.npy")
    data = bytearray(array.read_bytes())
    data[-5] ^= 255
    array.write_bytes(data)
    assert np.array_equal(tiny_imagenet.read_images(tmp_path)[0][0][0], before), "decoded again"
    monkeypatch.setattr("selfless.data.images.decode_image", lambda *a: pytest.fail("decoded again"))
    assert np.array_equal(tiny_imagenet.read_images(tmp_path)[0][0][0], before)
    note = array.with_suffix(".json")
    note.write_text(json.dumps({**json.loads(note.read_text()), "time": 0}))  # as after copying a cache
    assert np.array_equal(tiny_imagenet.read_images(tmp_path)[0][0][0], before)


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
