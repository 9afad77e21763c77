"""Pretrained weights by name and digest: the same run on every machine, and never another file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from selfless.data import Altered, MissingData, find_pretrained, locate_weights

FULL, CONVOLUTIONS = "alexnet.pth", "alexnet_imagenet_features.npz"


def put(root: Path, name: str, content: bytes) -> str:
    path = root / "alexnet" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return f"{name}@{hashlib.sha256(content).hexdigest()[:12]}"


def test_the_most_complete_file_that_is_here(tmp_path: Path) -> None:
    assert find_pretrained("alexnet", tmp_path) is None
    assert find_pretrained("mlp-128", tmp_path) is None
    few = put(tmp_path, CONVOLUTIONS, b"convolutions")
    assert find_pretrained("alexnet", tmp_path) == few
    every = put(tmp_path, FULL, b"all of it")
    assert find_pretrained("alexnet", tmp_path) == every


def test_a_name_becomes_the_path_of_that_very_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = put(tmp_path, FULL, b"all of it")
    monkeypatch.setenv("SELFLESS_DATA", str(tmp_path))
    found = locate_weights("alexnet", {"weights": named, "fc": "random"})
    assert found == {"weights": str(tmp_path / "alexnet" / FULL), "fc": "random"}
    for options in ({}, {"weights": str(tmp_path / "w@2.pth")}, {"weights": "w.pth"}, {"weights": tmp_path}):
        assert locate_weights("alexnet", options) == options
    put(tmp_path, FULL, b"something else")
    with pytest.raises(Altered, match="not the file this run was made with"):
        locate_weights("alexnet", {"weights": named})
    (tmp_path / "alexnet" / FULL).unlink()
    with pytest.raises(MissingData, match=r"the weights alexnet\.pth were not found; put the file into"):
        locate_weights("alexnet", {"weights": named})


def test_torchvisions_file_is_checked_by_the_digits_in_its_name(tmp_path: Path) -> None:
    put(tmp_path, "alexnet-owt-7be5be79.pth", b"cut off")
    with pytest.raises(Altered, match="its SHA-256 begins"):
        find_pretrained("alexnet", tmp_path)
