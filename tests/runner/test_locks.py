"""Locks between processes and files that are whole or absent, as the store of results uses them."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from selfless import Run
from selfless.files import locked, write_json
from selfless.runner.store import Store
from tests.runner.small_runs import BASE


def test_a_lock_that_was_removed_while_one_waited_is_taken_anew(tmp_path: Path) -> None:
    """The first removes the folder as it lets go; the second must not hold a file that a third would never find."""
    run, store = Run(**BASE), Store(tmp_path)
    path, waits, third = store.folder(run) / "lock", threading.Event(), threading.Event()
    found: list[Any] = []

    def second() -> None:
        with locked(path, waits.set) as file:
            found.append(os.path.samestat(os.fstat(file.fileno()), path.stat()))
            with ThreadPoolExecutor() as pool:
                done = pool.submit(lambda: locked(path, third.set).__enter__().close())
                found.append(third.wait(10))
                fcntl.flock(file, fcntl.LOCK_UN)
                done.result(10)

    with store.lock([run], lambda run: None):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(10)
    thread.join(30)
    assert found == [True, True]


def test_a_lock_whose_folder_goes_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mkdir finds the folder there, looks what it is, and it is gone: another process has tidied up. Then it is made again."""
    real, failed = Path.mkdir, []

    def once(path: Path, *args: Any, **how: Any) -> None:
        if not failed:
            failed.append(path)
            raise FileExistsError(17, "File exists", str(path))
        real(path, *args, **how)

    monkeypatch.setattr(Path, "mkdir", once)
    with locked(tmp_path / "run" / "lock", lambda: None):
        assert failed
        assert (tmp_path / "run" / "lock").exists()
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(FileExistsError), locked(tmp_path / "file" / "lock", lambda: None):
        pass


def test_a_folder_that_cannot_be_made_is_an_error_and_not_tried_for_ever(tmp_path: Path) -> None:
    (tmp_path / "results").symlink_to(tmp_path / "gone" / "results")
    with pytest.raises(FileExistsError, match="cannot make the folder"), locked(tmp_path / "results" / "key" / "lock", lambda: None):
        pass


def test_json_has_a_line_for_each_row(tmp_path: Path) -> None:
    value = {"matrix": [[1.5, 2], [None, True]], "of": {"name": 'a "b"', 3: [1, [2]]}, "empty": {}, "none": [], "flat": (1, 2)}
    write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(value))
    assert "  [1.5, 2],\n  [null, true]\n" in text
    assert ' "flat": [1, 2]\n' in text
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"rows": [[float("nan")]]})
    assert (tmp_path / "x.json").read_text() == text
