"""The files of one data set below one folder: loose, or inside the archives they were published in, whichever are there.

Every file is a slice of a file on disk (path, offset, size), so that many processes can read it without unpacking anything: a plain tar is
read in place, a compressed one is decompressed once into the cache and removed when the set has been prepared. Members with paths that
lead out of the archive are refused with the whole archive; links are never followed.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import shutil
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from selfless.data.archives import safe
from selfless.data.checksums import Altered
from selfless.data.paths import DataError, MissingData, cache_dir, making
from selfless.data.progress import bar

PACKED = (".tgz", ".tar.gz", ".tar")


@dataclass(frozen=True)
class Slice:
    """Where a file's bytes are."""

    path: str
    offset: int
    size: int

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


class Shelf:
    """Names (paths below the folder or within an archive, with /) and what is behind them. Loose files come before archives, and
    archives are opened only when something is not among the loose files."""

    def __init__(self, folder: Path, archives: Sequence[str] = ()) -> None:
        self.folder = folder
        self.archives: dict[str, Path] = {}
        self._files: dict[str, Slice] = {}
        self._by_name: dict[str, list[str]] = {}
        self._links: set[str] = set()
        self._closed: list[Path] = []
        self._endless: list[str] = []  # archives without the zeros that end a tar: cut off between two files, probably
        marks = hashlib.sha256()
        for place, folders, names in os.walk(folder):
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__MACOSX")
            for name in sorted(names):
                path = Path(place, name)
                if name.startswith(".") or path.is_symlink():
                    continue
                inside, stat = path.relative_to(folder).as_posix(), path.stat()
                marks.update(f"{inside}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
                if name in archives:
                    self.archives[name] = path
                    self._closed.append(path)
                else:
                    self._add(inside, Slice(str(path), 0, stat.st_size))
        self.mark = marks.hexdigest()  # of every file's name, size and time

    def _add(self, name: str, where: Slice) -> None:
        if name not in self._files:
            self._files[name] = where
            self._by_name.setdefault(name.rsplit("/", 1)[-1], []).append(name)

    def loose(self, name: str) -> Path | None:
        """The file of that name on disk itself, an archive or not."""
        if name in self.archives:
            return self.archives[name]
        found = [inside for inside in self._by_name.get(name, ()) if self._files[inside].path == str(self.folder / inside)]
        return self.folder / min(found, key=len) if found else None

    def find(self, tail: str) -> str | None:
        """The name that is `tail` or ends with /`tail`; the shortest of several."""
        while True:
            every = self._by_name.get(tail.rsplit("/", 1)[-1], ())
            found = [name for name in every if name == tail or name.endswith("/" + tail)]
            if found:
                return min(found, key=lambda name: (len(name), name))
            if not self._closed:
                return None
            self._open(self._closed.pop(0))

    def need(self, tail: str) -> str:
        """As `find`; a file that is nowhere is an error that says what to do."""
        if (found := self.find(tail)) is None:
            if any(name == tail or name.endswith("/" + tail) for name in self._links):
                raise DataError(f"{self.folder}: {tail} is a link, not a regular file: refused")
            self._whole(tail)
            where = f" (looked into {', '.join(self.archives)})" if self.archives else ""
            raise MissingData(
                f"{self.folder} does not hold {tail}{where}; `selfless data fetch {self.folder.name}` says where it comes from"
            )
        return found

    def top(self, tail: str) -> str:
        """What stands before `tail` in its name: "CUB_200_2011/" for images.txt."""
        return self.need(tail).removesuffix(tail)

    def names(self) -> list[str]:
        """Every name, in order; opens all archives."""
        while self._closed:
            self._open(self._closed.pop(0))
        return sorted(self._files)

    def slice(self, name: str, listed_in: str) -> Slice:
        """Where an image is; one that an annotation names and that is not there is an error."""
        if name not in self._files:
            self.names()
        if name not in self._files:
            self._whole(name)
            raise Altered(f"{self.folder}: {listed_in} lists {name}, which is not there; unpack or fetch the images again")
        return self._files[name]

    def _whole(self, lacking: str) -> None:
        """Something is not there: was an archive cut off before it?"""
        if self._endless:
            raise Altered(f"{self.folder} does not hold {lacking}: {', '.join(self._endless)} is cut off; delete it and fetch it again")

    def read(self, name: str) -> bytes:
        return self._files[name].read()

    def text(self, name: str) -> str:
        try:
            return self.read(name).decode("utf-8")
        except UnicodeDecodeError as error:
            raise Altered(f"{self.folder}: {name} is not text ({error}); fetch it again") from error

    def _open(self, archive: Path) -> None:
        """Adds an archive's regular files."""
        try:
            plain = archive if _is_tar(archive) else unpacked(archive)
            size = plain.stat().st_size
            if any(Slice(str(plain), max(0, size - 512), 512).read()):
                self._endless.append(archive.name)
            with tarfile.open(plain, "r:") as tar:
                for member in tar:
                    name = safe(member.name, archive).as_posix()
                    if member.islnk() or member.issym():
                        self._links.add(name)
                    elif member.isreg() and not member.issparse() and not name.rsplit("/", 1)[-1].startswith("."):
                        if member.offset_data + member.size > size:
                            raise Altered(f"{archive} is cut off within {name}; delete it and fetch it again")
                        self._add(name, Slice(str(plain), member.offset_data, member.size))
        except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, DataError):
                raise
            raise Altered(f"{archive} is damaged or half-written ({error}); delete it and fetch it again") from error


def _is_tar(archive: Path) -> bool:
    with archive.open("rb") as file:
        return file.read(2) != b"\x1f\x8b"


def scratch() -> Path:
    return cache_dir() / "objects" / "unpacked"


def _copy_of(archive: Path) -> Path:
    stat = archive.stat()
    key = hashlib.sha256(f"{archive.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    return scratch() / f"{archive.name}.{key}.tar"


def unpacked(archive: Path) -> Path:
    """The plain tar of a .tgz in the cache, made once."""
    plain = _copy_of(archive)
    if plain.is_file():
        return plain
    plain.parent.mkdir(parents=True, exist_ok=True)
    free, size = shutil.disk_usage(plain.parent).free, archive.stat().st_size
    if free < 2 * size:
        raise DataError(
            f"unpacking {archive} takes about {size / 1e9:.1f} GB in {plain.parent}, where {free / 1e9:.1f} GB are free; make room"
        )
    with (
        archive.open("rb") as packed,
        bar(f"unpacking {archive.name}", size) as progress,
        gzip.GzipFile(fileobj=packed) as content,
        making(plain) as draft,
        draft.open("wb") as out,
    ):
        while piece := content.read(1 << 20):
            out.write(piece)
            progress.at(packed.tell())
    return plain


def forget_unpacked(shelf: Shelf) -> None:
    """Removes the plain tars again."""
    for archive in shelf.archives.values():
        _copy_of(archive).unlink(missing_ok=True)
