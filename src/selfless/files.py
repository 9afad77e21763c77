"""Files that are whole or absent: written under a temporary name in the same folder, then renamed. And locks between processes."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows: no advisory locks; renames are still atomic
    fcntl = None  # type: ignore[assignment]

TRIES = 500  # to make a folder that others may be removing


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """`write` fills a temporary file beside `path`, which then takes its name in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(Path(name))
        os.chmod(name, 0o644)
        with open(name, "rb") as written:
            os.fsync(written.fileno())
        os.replace(name, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def write_text(path: Path, text: str) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomically(path, write)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, _laid_out(value) + "\n")


def _laid_out(value: Any, indent: int = 0) -> str:
    """JSON with a line for every list or object that holds no other: a row of a matrix, an epoch's numbers."""
    inner = list(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(inner, list | tuple) or not any(isinstance(v, Mapping | list | tuple) for v in inner):
        return json.dumps(value, allow_nan=False)
    names = [json.dumps({name: 0})[1:-2] for name in value] if isinstance(value, Mapping) else [""] * len(inner)  # numbers as text too
    pad, (opening, closing) = "\n" + " " * (indent + 1), "{}" if isinstance(value, Mapping) else "[]"
    body = f",{pad}".join(name + _laid_out(v, indent + 1) for name, v in zip(names, inner, strict=True))
    return f"{opening}{pad}{body}\n{' ' * indent}{closing}"


@contextlib.contextmanager
def locked(path: Path, busy: Callable[[], None]) -> Iterator[IO[str]]:
    """Hold an exclusive lock on `path`; if another process has it, call `busy` once and wait. A killed process lets go of it.

    Who holds the lock may remove the file, and its folder: one who waited then holds a file that nobody else will find, and takes the
    new one instead.
    """
    told = False
    tries = 0
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a", encoding="utf-8")  # noqa: SIM115  # closed by the block below
        except (FileNotFoundError, FileExistsError) as error:  # the folder was removed since, or when mkdir looked what it is
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
                    if not told:
                        busy()
                    told = True
                    fcntl.flock(file, fcntl.LOCK_EX)
            if _is(path, file):
                yield file
                return


def _is(path: Path, file: IO[str]) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
