"""CIFAR-100 in every wrapping; damaged files and unsafe archives are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from selfless.data import Altered, DataError, cache_dir, load, verify
from selfless.data.sources import cifar
from tests.data.published import cifar_contents, write_tar


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
    cifar.read_records(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(cifar, "untar", lambda *a: pytest.fail("unpacked again"))
        cifar.read_records(tmp_path)
    cached = cache_dir() / "unpacked" / "cifar-100-binary" / "train.bin"
    cached.write_bytes(cached.read_bytes()[:-1])
    assert len(cifar.read_records(tmp_path)[0][1]) == 200, "a damaged cache is unpacked again"
    assert not list(cached.parent.glob(".*")), "nothing temporary is left"


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
        cifar.parse(bytes(data[:-1]), "x")
    data[1] = 100
    with pytest.raises(Altered, match="label out of range"):
        cifar.parse(bytes(data), "x")
