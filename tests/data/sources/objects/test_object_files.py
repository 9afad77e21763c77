"""The files of an object set, loose and in archives; unsafe and damaged archives are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfless.data import Altered, DataError, cache_dir
from tests.data import object_layouts as made
from tests.data.published import jpeg


@pytest.mark.parametrize("archive", ["102flowers.tgz", "indoorCVPR_09.tar"])
@pytest.mark.parametrize("evil", ["../../evil.jpg", "/etc/evil.jpg"])
def test_paths_that_lead_out_of_an_archive(archive: str, evil: str, tmp_path: Path) -> None:
    name = "flowers" if "flowers" in archive else "scenes"
    folder = made.put(tmp_path, name, packed=True)
    made.write_archive(folder / archive, {evil: jpeg(1)})
    with pytest.raises(DataError, match="leads out of the archive: refused"):
        made.list_images(folder)


def test_links_in_an_archive_are_not_followed(tmp_path: Path) -> None:
    folder = made.put(tmp_path, "birds", {})
    made.write_archive(folder / "CUB_200_2011.tgz", made.birds(), link="CUB_200_2011/image_class_labels.txt")
    with pytest.raises(DataError, match="is a link, not a regular file: refused"):
        made.list_images(folder)


@pytest.mark.parametrize("archive", ["CUB_200_2011.tgz", "VOCtrainval_11-May-2012.tar"])
@pytest.mark.parametrize("share", [0.001, 0.2, 0.5, 0.9])
def test_an_archive_that_is_cut_off(archive: str, share: float, tmp_path: Path) -> None:
    folder = made.put(tmp_path, "birds" if "CUB" in archive else "actions", packed=True)
    data = (folder / archive).read_bytes()
    (folder / archive).write_bytes(data[: int(len(data.rstrip(b"\0")) * share)])
    with pytest.raises(Altered, match=r"half-written|cut off"):
        made.list_images(folder)
    assert not list((cache_dir() / "objects").rglob("*.tar")), "nothing half-unpacked is left"


def test_too_little_room_is_an_error_before_unpacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made.put(tmp_path, "birds", packed=True)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 5})())
    with pytest.raises(DataError, match="make room"):
        made.list_images(folder)


def test_it_does_not_matter_where_it_was_unpacked(tmp_path: Path) -> None:
    files = {f"some/folder/{name}": data for name, data in made.birds().items()}
    assert len(made.list_images(made.put(tmp_path, "birds", {**files, "some/._images.txt": b"x", ".hidden/images.txt": b"y"})).train) == 4
