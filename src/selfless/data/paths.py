"""Where data files are, and how they are written.

Data is looked up in the folder that the caller names, else in `SELFLESS_DATA`, and after that in the user's cache. A shared data
folder is often read-only, so everything that is unpacked, decoded or prepared is written to the cache.
"""

from __future__ import annotations

import glob
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from selfless.data.errors import DataError
from selfless.files import write_atomically

STALE_S = 24 * 3600.0  # age at which the temporary files of killed processes are removed

Place = str | os.PathLike[str] | None  # a data folder; None: `SELFLESS_DATA`, else the cache


def cache_dir() -> Path:
    """Return the user's cache folder: `$XDG_CACHE_HOME/selfless` if that is set, else the platform's usual folder."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "selfless"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "selfless"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "selfless" / "cache"
    return Path.home() / ".cache" / "selfless"


def data_dir(explicit: Place = None) -> Path:
    """Return the first folder to look in: the given one, else `SELFLESS_DATA`, else `data` in the cache."""
    if explicit is not None:
        return _expand(explicit, "--data-dir")
    if named := os.environ.get("SELFLESS_DATA"):
        return _expand(named, "SELFLESS_DATA")
    return cache_dir() / "data"


def _expand(place: str | os.PathLike[str], where: str) -> Path:
    """Return the path with ~ and ~user replaced by the home folder; `where` names the setting in the error."""
    try:
        return Path(place).expanduser()
    except RuntimeError as error:
        raise DataError(f"{where} is {str(place)!r}, and there is no home folder of that user; write the whole path") from error


def data_dirs(explicit: Place = None) -> tuple[Path, ...]:
    """Return every folder to look in, in order: `data_dir`, then `data` in the cache."""
    return tuple(dict.fromkeys((data_dir(explicit), cache_dir() / "data")))


def is_writable(folder: Path) -> bool:
    """Return whether files can be created in `folder`, or in its nearest existing parent.

    The mode bits count even for root, who may write anywhere: a folder that its owner made read-only stays unchanged.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and bool(folder.stat().st_mode & 0o222) and os.access(folder, os.W_OK)


def writable_dir(explicit: Place = None) -> Path:
    """Return the folder for fetched files: `data_dir` if it is writable, else `data` in the cache."""
    first = data_dir(explicit)
    return first if is_writable(first) else cache_dir() / "data"


def make_folder(folder: Path) -> Path:
    """Create `folder` and return it. Raise DataError with the remedy if files cannot be created in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("permission denied")
    except OSError as error:
        raise DataError(f"cannot write to {folder} ({error}); set XDG_CACHE_HOME to a folder you own") from error
    return folder


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Create `path` atomically: `write` fills a temporary file beside it, which is then renamed."""
    make_folder(path.parent)
    for left_over in path.parent.glob(f".{glob.escape(path.name)}.*"):  # how `write_atomically` names its temporary files
        with suppress(OSError):
            if time.time() - left_over.stat().st_mtime > STALE_S:
                left_over.unlink()

    def fill(temporary: Path) -> None:
        write(temporary)

    write_atomically(path, fill)
