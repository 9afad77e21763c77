"""Where data lies, and how a file comes into being.

Data is looked for in an explicit folder, else in `SELFLESS_DATA`, and always in the per-user cache as well, because a
shared data folder is often read-only: whatever is unpacked or decoded from it goes to the cache. Every file is
written under a temporary name and renamed, so a file with its proper name is a whole file.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STALE_S = 24 * 3600.0  # what a killed process left behind is removed after a day


class DataError(RuntimeError):
    """Data that is there but cannot be used; the message says which file, why, and the remedy."""


class MissingData(DataError, FileNotFoundError):
    """Data that is not there and could not be fetched; the message says which file to put where."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def cache_dir() -> Path:
    """The per-user cache: `$XDG_CACHE_HOME/selfless` where that is set, else the platform's usual folder."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "selfless"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "selfless"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "selfless" / "cache"
    return Path.home() / ".cache" / "selfless"


def data_dir(explicit: str | os.PathLike[str] | None = None) -> Path:
    """The folder data is looked for in first: the one given, else `SELFLESS_DATA`, else the cache's `data`."""
    if explicit is not None:
        return Path(explicit).expanduser()
    if named := os.environ.get("SELFLESS_DATA"):
        return Path(named).expanduser()
    return cache_dir() / "data"


def roots(explicit: str | os.PathLike[str] | None = None) -> tuple[Path, ...]:
    """Every folder data is looked for in, in order: `data_dir` and the cache."""
    return tuple(dict.fromkeys((data_dir(explicit), cache_dir() / "data")))


def writable(folder: Path) -> bool:
    """Whether files may be made in `folder` (or in its nearest existing parent).

    The mode bits count too: root may write anywhere, and a folder its owner made read-only is meant to stay as it is.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and bool(folder.stat().st_mode & 0o222) and os.access(folder, os.W_OK)


def writable_root(explicit: str | os.PathLike[str] | None = None) -> Path:
    """Where fetched files go: `data_dir` if one may write there, else the cache."""
    first = data_dir(explicit)
    return first if writable(first) else cache_dir() / "data"


@contextmanager
def workshop(folder: Path) -> Iterator[Path]:
    """A temporary folder on the same file system as `folder`, so that a rename into `folder` is atomic."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = tempfile.TemporaryDirectory(prefix=".making-", dir=folder, ignore_cleanup_errors=True)
    except OSError as error:
        raise DataError(f"cannot write to {folder} ({error}); set XDG_CACHE_HOME to a folder you own") from error
    for old in folder.glob(".making-*"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > STALE_S:
                shutil.rmtree(old)
    with probe as made:
        yield Path(made)


@contextmanager
def making(path: Path) -> Iterator[Path]:
    """Yields a temporary path; it becomes `path` when the block ends well and vanishes when it does not."""
    with workshop(path.parent) as folder:
        draft = folder / path.name
        yield draft
        with draft.open("rb+") as f:
            os.fsync(f.fileno())
        os.replace(draft, path)
