"""Read archives and folders without trusting them.

Only the wanted members are read, one by one; nothing is unpacked as a whole. An archive with an absolute path, a `..` or a link in
the place of a wanted file is refused: no published data set has these.
"""

from __future__ import annotations

import hashlib
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

from selfless.data.checksums import CHUNK
from selfless.data.errors import Altered, DataError
from selfless.data.paths import write_file
from selfless.data.progress import progress_bar


def check_path(name: str, archive: Path) -> PurePosixPath:
    """Return a member's path. Raise DataError if it leads out of the folder that the archive is unpacked in."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or (path.parts and path.parts[0].endswith(":")):
        raise DataError(f"{archive} holds the path {name!r}, which leads out of the archive: refused")
    return path


def copy_pieces(read: Callable[[int], bytes], path: Path, report: Callable[[], None]) -> None:
    """Write to `path` what `read(size)` returns, until it returns nothing; call `report` after each piece."""

    def write(temporary: Path) -> None:
        with temporary.open("wb") as out:
            while piece := read(CHUNK):
                out.write(piece)
                report()

    write_file(path, write)


def untar(archive: Path, wanted: Collection[str], folder: Path) -> None:
    """Copy the files whose base names are in `wanted` from a .tar.gz or .tar.xz into `folder`."""
    missing = set(wanted)
    try:
        with (
            archive.open("rb") as packed,
            progress_bar(f"unpacking {archive.name}", archive.stat().st_size) as bar,
            tarfile.open(fileobj=packed, mode="r|*") as tar,
        ):
            for member in tar:
                name = check_path(member.name, archive).name
                if name not in missing:
                    continue
                content = tar.extractfile(member) if member.isreg() else None
                if content is None:
                    raise DataError(f"{archive}: {member.name!r} is not a regular file: refused")
                with content:
                    copy_pieces(content.read, folder / name, lambda: bar.move_to(packed.tell()))
                missing.discard(name)
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise Altered(f"{archive} is damaged or half-written ({error}); delete it and fetch it again") from error
    if missing:
        raise Altered(f"{archive} does not hold {', '.join(sorted(missing))}; fetch it again")


class Tree:
    """Read-only access to the files below one folder, on disk or in a zip.

    `mark` identifies the content: a hash over every file's name and its CRC (zip) or its size and time (folder).
    """

    def __init__(self, place: Path, top: str) -> None:
        self.place = place
        self._zip: zipfile.ZipFile | None = None
        self._members: dict[str, str] = {}
        marks = hashlib.sha256()
        if place.is_dir():
            for path in sorted(p for p in place.rglob("*") if p.is_file() and not p.is_symlink()):
                name, stat = path.relative_to(place).as_posix(), path.stat()
                self._members[name] = str(path)
                marks.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        else:
            try:
                self._zip = zipfile.ZipFile(place)
            except (zipfile.BadZipFile, OSError) as error:
                raise Altered(f"{place} is damaged or half-written ({error}); delete it and fetch it again") from error
            try:
                checked = [(info, check_path(info.filename, place).parts) for info in self._zip.infolist()]
            except DataError:
                self._zip.close()
                raise
            for info, parts in checked:
                if info.is_dir() or top not in parts:
                    continue
                name = "/".join(parts[parts.index(top) + 1 :])
                self._members[name] = info.filename
                marks.update(f"{name}\0{info.file_size}\0{info.CRC}\n".encode("utf-8", "surrogateescape"))
        self.mark = marks.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._zip is not None:
            self._zip.close()

    def names(self) -> list[str]:
        """Return the path of every file below the top folder, sorted."""
        return sorted(self._members)

    def read(self, name: str) -> bytes:
        """Return the bytes of one file. In a zip, its CRC is checked."""
        if name not in self._members:
            raise Altered(f"{self.place} does not hold {name}; fetch it again")
        if self._zip is None:
            return Path(self._members[name]).read_bytes()
        try:
            return self._zip.read(self._members[name])
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise Altered(f"{self.place} is damaged at {name} ({error}); delete it and fetch it again") from error
