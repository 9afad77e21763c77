"""Folders for data, and files that are whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from selfless.data import DataError, cache_dir, data_dirs
from selfless.data.paths import write_file


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail(temporary: Path) -> None:
        temporary.write_bytes(b"half")
        raise KeyError

    with pytest.raises(KeyError):
        write_file(tmp_path / "deep" / "x", fail)
    assert not list((tmp_path / "deep").iterdir())
    write_file(tmp_path / "deep" / "x", lambda temporary: temporary.write_bytes(b"whole"))
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["x"]
    assert (tmp_path / "deep" / "x").read_bytes() == b"whole"


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot write to .*; set XDG_CACHE_HOME"):
        write_file(tmp_path / "file" / "x", lambda temporary: None)


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: Path) -> None:
    old, new = tmp_path / ".x.gz.abc", tmp_path / ".x.gz.def"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    write_file(tmp_path / "x.gz", lambda temporary: temporary.write_bytes(b"whole"))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".x.gz.def", "x.gz"]


def test_where_data_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_dirs() == (cache_dir() / "data",)
    monkeypatch.setenv("SELFLESS_DATA", str(tmp_path / "shared"))
    assert data_dirs() == (tmp_path / "shared", cache_dir() / "data")
    assert data_dirs(tmp_path / "mine") == (tmp_path / "mine", cache_dir() / "data")
