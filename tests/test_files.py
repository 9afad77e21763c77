"""Atomic files, the layout of JSON, and locks between processes."""

import errno
import json
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from selfless.files import (
    REMEDIES,
    is_running,
    locked,
    marked,
    remove_left_over,
    write_atomically,
    write_bytes,
    write_json,
    write_tensors,
    write_text,
)


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


@pytest.mark.parametrize("number", sorted(REMEDIES))
def test_an_error_of_the_disk_names_the_file_and_the_remedy(tmp_path, number):
    path = tmp_path / "file.txt"

    def fail(temporary):
        raise OSError(number, os.strerror(number))

    with pytest.raises(OSError, match=f"^cannot write {re.escape(str(path))}: {os.strerror(number).lower()}; ") as caught:
        write_atomically(path, fail)
    assert caught.value.errno == number
    assert type(caught.value) is type(OSError(number, ""))
    assert str(caught.value).endswith(REMEDIES[number])


def test_other_errors_are_as_they_were(tmp_path):
    mine = OSError(errno.EINVAL, "odd")

    def fail(temporary):
        raise mine

    with pytest.raises(OSError, match="odd") as caught:
        write_atomically(tmp_path / "file.txt", fail)
    assert caught.value is mine


def test_what_a_killed_process_left_is_removed_when_the_same_file_is_written(tmp_path):
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    assert not is_running(ended.pid)
    assert not is_running(10**30)
    assert is_running(os.getpid())
    names = []
    write_atomically(tmp_path / "a[1].txt", lambda temporary: names.append(temporary.name))
    (own,) = names
    assert own.startswith(f".a[1].txt.{own.split('.')[3].partition('-')[0]}-{os.getpid()}.")
    old = own.replace(f"-{os.getpid()}.", f"-{ended.pid}.")
    kept = [own, old.replace(".a[1].txt.", ".b.txt."), old.replace(f"-{ended.pid}.", "-x."), old.replace(".a[1].txt.", ".a1.txt.")]
    for name in (old, *kept):
        (tmp_path / name).touch()
    write_text(tmp_path / "a[1].txt", "again")
    assert {p.name for p in tmp_path.iterdir()} == {"a[1].txt", *kept}
    remove_left_over(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"a[1].txt", own, kept[2]}


def test_bytes_and_tensors_are_read_as_they_were_written(tmp_path):
    write_bytes(tmp_path / "x.bin", b"\x00\xff")
    assert (tmp_path / "x.bin").read_bytes() == b"\x00\xff"
    write_tensors(tmp_path / "x.safetensors", {"a": torch.arange(3)}, {"about": "α"})
    assert load_file(tmp_path / "x.safetensors")["a"].tolist() == [0, 1, 2]
    assert '"about":"α"'.encode() in (tmp_path / "x.safetensors").read_bytes()


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


def test_a_marker_is_there_inside_with_and_makes_its_folder(tmp_path):
    with marked(tmp_path / "deep" / "folder") as first, marked(tmp_path / "deep" / "folder") as second:
        assert {first, second} == set((tmp_path / "deep" / "folder").iterdir())
        second.unlink()  # another machine may tidy
    assert not list((tmp_path / "deep" / "folder").iterdir())


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(FileExistsError), locked(tmp_path / "file" / "lock", lambda: None):
        pass
    (tmp_path / "results").symlink_to(tmp_path / "missing" / "results")
    with pytest.raises(FileExistsError, match="cannot make the folder"), locked(tmp_path / "results" / "key" / "lock", lambda: None):
        pass
