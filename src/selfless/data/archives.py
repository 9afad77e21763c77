"""Reading archives and folders without trusting them.

Nothing is unpacked wholesale: the wanted members are read one by one. An archive that holds an absolute path, a `..`
or a wanted link is refused as a whole: whoever made it was not publishing data.
"""

from __future__ import annotations

import hashlib
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

from selfless.data.checksums import Altered
from selfless.data.paths import DataError
from selfless.data.progress import bar


def safe(name: str, archive: Path) -> PurePosixPath:
    """The member's path, or DataError if it leads out of the folder it would be unpacked in."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or (path.parts and path.parts[0].endswith(":")):
        raise DataError(f"{archive} holds the path {name!r}, which leads out of the archive: refused")
    return path


def untar(archive: Path, wanted: Collection[str], folder: Path) -> None:
    """Copies the regular files whose base names are in `wanted` out of a .tar.gz or .tar.xz into `folder`."""
    missing = set(wanted)
    try:
        with (
            archive.open("rb") as packed,
            bar(f"unpacking {archive.name}", archive.stat().st_size) as progress,
            tarfile.open(fileobj=packed, mode="r|*") as tar,
        ):
            for member in tar:
                name = safe(member.name, archive).name
                if name not in missing:
                    continue
                content = tar.extractfile(member) if member.isreg() else None
                if content is None:
                    raise DataError(f"{archive}: {member.name!r} is not a regular file: refused")
                with content, (folder / name).open("wb") as out:
                    while piece := content.read(1 << 20):
                        out.write(piece)
                        progress.at(packed.tell())
                missing.discard(name)
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise Altered(f"{archive} is damaged or half-written ({error}); delete it and fetch it again") from error
    if missing:
        raise Altered(f"{archive} does not hold {', '.join(sorted(missing))}; fetch it again")


class Tree:
    """Read-only files below one top folder, in a zip or on disk: the same data set unpacked or not."""

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
            for info in self._zip.infolist():
                parts = safe(info.filename, place).parts
                if info.is_dir() or top not in parts:
                    continue
                name = "/".join(parts[parts.index(top) + 1 :])
                self._members[name] = info.filename
                marks.update(f"{name}\0{info.file_size}\0{info.CRC}\n".encode())
        self.mark = marks.hexdigest()  # of every file's name and content (zip: CRC) or size and time (folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._zip is not None:
            self._zip.close()

    def names(self) -> list[str]:
        """Every file's path below the top, in order."""
        return sorted(self._members)

    def read(self, name: str) -> bytes:
        """One file's bytes; in a zip its CRC is checked on the way."""
        if name not in self._members:
            raise Altered(f"{self.place} does not hold {name}; fetch it again")
        if self._zip is None:
            return Path(self._members[name]).read_bytes()
        try:
            return self._zip.read(self._members[name])
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise Altered(f"{self.place} is damaged at {name} ({error}); delete it and fetch it again") from error
