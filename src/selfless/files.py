"""Files that are complete or absent, and locks between processes.

A file is written under a temporary name in its own folder and then renamed, so that a reader never sees half of it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows has no advisory locks; renaming is still atomic there
    fcntl = None  # type: ignore[assignment]

_HOST = re.sub(r"[^A-Za-z0-9_]", "_", socket.gethostname())
_ROOM, _RIGHTS = "make room, or use another folder", "use another folder, or change its rights"
REMEDIES = {  # what to do when a file cannot be written, by the number of the error
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: _ROOM,
    errno.EROFS: _RIGHTS,
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.ENOENT: "its folder was removed or renamed meanwhile: start again",
    errno.ENOTDIR: "use another folder: a part of this path is a file",
    errno.EIO: "the disk reports an error: use another one",
}
TRIES = 500  # attempts to open a lock file whose folder other processes may remove at the same time


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it to `path` in one step. Folders are made as needed."""
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_left_over(path.parent, path.name)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.{_HOST}-{os.getpid()}.")
        os.close(handle)
        try:
            write(Path(name))
            os.chmod(name, 0o644)  # mkstemp makes files that only their owner can read
            with open(name, "rb") as written:
                os.fsync(written.fileno())
            os.replace(name, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside `with`: an error of the disk names the file that was to be written, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        raise _explain(error.errno, path) from error


def _explain(number: int, path: Path) -> OSError:
    """Return the error of the disk with this number; its message names the file."""
    kind = type(OSError(number, ""))  # PermissionError, FileNotFoundError, …
    error = kind(f"cannot write {path}: {os.strerror(number).lower()}; {REMEDIES[number]}")
    error.errno = number
    return error


@contextlib.contextmanager
def marked(folder: Path) -> Iterator[Path]:
    """Yield an empty file that exists inside `with`; a machine that sees it shares the folder. `remove_left_over` knows it, too."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".marker.{_HOST}-{os.getpid()}.")
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def remove_left_over(folder: Path, name: str = "*") -> None:
    """Remove the temporary files that killed processes of this machine left in a folder, for the file `name` or for any.

    It uses no pattern: Python keeps the patterns of all names for ever, and each run has a name of its own.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        start, _, end = path.name.rpartition(f".{_HOST}-")
        process = end.partition(".")[0]
        is_ours = start.startswith(".") if name == "*" else start == f".{name}"
        if is_ours and process.isdigit() and not is_running(int(process)):
            with contextlib.suppress(OSError):
                path.unlink()


def is_running(process: int) -> bool:
    """Return whether a process of this machine exists."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it runs, as another user
        pass
    return True


def write_tensors(path: Path, tensors: Mapping[str, Any], about: Mapping[str, str]) -> None:
    """Write named tensors with some text as safetensors, atomically."""
    write_atomically(path, lambda temporary: save_tensors(temporary, tensors, about))


def save_tensors(path: Path, tensors: Mapping[str, Any], about: Mapping[str, str]) -> None:
    """Write named tensors with some text as safetensors, not atomically. An error of the disk is an OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, dict(about))
    except SafetensorError as error:  # it hides the error of the disk in its text
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomically(path, write)


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path`, atomically."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomically(path, write)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` to `path` as JSON, atomically. NaN and infinity raise a ValueError: they are not JSON."""
    write_text(path, _format_json(value) + "\n")


def _format_json(value: Any, indent: int = 0) -> str:
    """Return JSON with one line for each innermost list or object, such as a row of a matrix or the numbers of an epoch."""
    inner = list(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(inner, list | tuple) or not any(isinstance(v, Mapping | list | tuple) for v in inner):
        return json.dumps(value, allow_nan=False)
    # json.dumps turns keys that are numbers into text; {key: 0} without its last two characters, "0}", is the key in that form.
    keys = [json.dumps({key: 0})[1:-2] for key in value] if isinstance(value, Mapping) else [""] * len(inner)
    line, (opening, closing) = "\n" + " " * (indent + 1), "{}" if isinstance(value, Mapping) else "[]"
    body = f",{line}".join(key + _format_json(v, indent + 1) for key, v in zip(keys, inner, strict=True))
    return f"{opening}{line}{body}\n{' ' * indent}{closing}"


@contextlib.contextmanager
def locked(path: Path, busy: Callable[[], None]) -> Iterator[IO[str]]:
    """Hold an exclusive lock on the file `path` inside the `with` block; a killed process loses its lock.

    If another process holds the lock, call `busy` once and wait. The holder may remove the file and its folder. The process that waited
    then has a lock on a file that no other process can find, so it locks the new file instead.
    """
    waited = False
    tries = 0
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a", encoding="utf-8")  # noqa: SIM115  # closed by the block below
        except (FileNotFoundError, FileExistsError) as error:  # another process removed the folder, or mkdir saw it disappear
            tries += 1
            if tries == TRIES or (path.parent.exists() and not path.parent.is_dir()):
                raise type(error)(f"cannot make the folder {path.parent}: {error.strerror}") from error
            time.sleep(0.001)
            continue
        with file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if not waited:
                        busy()
                    waited = True
                    fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(path, file):
                yield file
                return


def _is_at(path: Path, file: IO[str]) -> bool:
    """True if `path` still leads to the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
