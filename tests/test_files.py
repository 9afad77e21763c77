"""Atomic files, the layout of JSON, and locks between processes."""

import json
import stat
import threading
from pathlib import Path

import pytest

from selfless.files import locked, write_atomically, write_json, write_text


def test_a_file_is_complete_or_as_before(tmp_path):
    path = tmp_path / "new" / "file.txt"
    write_text(path, "first")

    def fail(temporary):
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "first"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_reader_never_sees_the_temporary_file(tmp_path):
    path = tmp_path / "file.txt"

    def write(temporary):
        temporary.write_text("α")
        assert not path.exists()
        assert temporary.parent == path.parent

    write_atomically(path, write)
    assert path.read_text(encoding="utf-8") == "α"


def test_json_has_a_line_for_each_innermost_list(tmp_path):
    value = {"matrix": [[1.5, 2], [None, True]], "of": {"name": 'a "b"', 3: [1, [2]]}, "empty": {}, "none": [], "flat": (1, 2)}
    write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(value))
    assert "  [1.5, 2],\n  [null, true]\n" in text
    assert ' "flat": [1, 2]\n' in text
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "z.json", {"rows": [[float("nan")]]})
    assert not (tmp_path / "z.json").exists()


def test_a_lock_is_exclusive_and_busy_is_called_once(tmp_path):
    path, busy, order = tmp_path / "key" / "lock", threading.Event(), []

    def second():
        with locked(path, busy.set):
            order.append("second")

    with locked(path, lambda: pytest.fail("nobody else holds the lock")):
        thread = threading.Thread(target=second)
        thread.start()
        assert busy.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_a_lock_makes_its_folder_again_if_another_process_removes_it(tmp_path, monkeypatch):
    real, failed = Path.mkdir, []

    def fail_once(path, *args, **options):
        if not failed:
            failed.append(path)
            raise FileExistsError(17, "File exists", str(path))  # what mkdir raises if the folder disappears while it looks
        real(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", fail_once)
    with locked(tmp_path / "run" / "lock", lambda: None):
        assert failed
        assert (tmp_path / "run" / "lock").exists()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(FileExistsError), locked(tmp_path / "file" / "lock", lambda: None):
        pass
    (tmp_path / "results").symlink_to(tmp_path / "missing" / "results")
    with pytest.raises(FileExistsError, match="cannot make the folder"), locked(tmp_path / "results" / "key" / "lock", lambda: None):
        pass
