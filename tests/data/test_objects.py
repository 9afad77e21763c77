"""Fetch object sets: what is here is kept, what is altered is replaced, what is missing is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfless.data import Altered, MissingData, fetch_objects, verify_objects
from tests.data import object_layouts as made

pytestmark = pytest.mark.usefixtures("small_objects")


def test_fetch_one(served: list[str], tmp_path: Path) -> None:
    folder = fetch_objects("flowers", data_dir=tmp_path / "d")
    assert folder == tmp_path / "d" / "objects" / "flowers"
    assert sorted(p.name for p in folder.iterdir()) == ["102flowers.tgz", "imagelabels.mat", "setid.mat"]
    assert verify_objects("flowers", data_dir=tmp_path / "d").status == "reduced", "a small one"
    count = len(served)
    fetch_objects("flowers", data_dir=tmp_path / "d")
    assert len(served) == count, "what is here is not fetched again"
    (folder / "setid.mat").write_bytes(b"half")
    check = verify_objects("flowers", data_dir=tmp_path / "d")
    assert check.status == "altered"
    assert "setid.mat is not the published file" in check.detail
    fetch_objects("flowers", data_dir=tmp_path / "d")
    assert len(served) == count + 1, "what is altered is replaced, and nothing else"
    assert fetch_objects("scenes", data_dir=tmp_path / "d").name == "scenes", "MIT publishes no checksums"


def test_a_wrong_file_on_the_mirror_is_not_kept(served: list[str], server: tuple[str, dict[str, bytes], list[str]], tmp_path: Path) -> None:
    server[1]["/test_32x32.mat"] = b"something else"
    with pytest.raises(MissingData, match=r"test_32x32.mat: 127.0.0.1: MD5 hash") as error:
        fetch_objects("svhn", data_dir=tmp_path / "d")
    assert "train_32x32.mat   from" not in str(error.value), "what is there is not asked for"
    assert [p.name for p in (tmp_path / "d/objects/svhn").iterdir()] == ["train_32x32.mat"]


def test_what_was_unpacked_by_hand_is_left_alone(served: list[str], tmp_path: Path) -> None:
    folder = made.put(tmp_path / "d", "cars", made.cars_training_half())
    assert fetch_objects("cars", data_dir=tmp_path / "d") == folder
    assert not served
    (folder / "train_perfect_preds.txt").write_text("1\nx\n")
    with pytest.raises(Altered, match="'x' is not a number"):
        fetch_objects("cars", data_dir=tmp_path / "d")
