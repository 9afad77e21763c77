"""The files of one object set below one folder: loose, or inside the archives they were published in.

Every file is a slice of a file on disk (path, offset, size), so that many processes can read it without unpacking. A plain tar is read
in place. A compressed one is decompressed once into the cache, and removed when the set has been prepared. An archive with a path that
leads out of it is refused; links are never followed.
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

from selfless.data.archives import check_path, copy_pieces
from selfless.data.errors import Altered, DataError, MissingData
from selfless.data.paths import cache_dir, make_folder
from selfless.data.progress import progress_bar

PACKED = (".tgz", ".tar.gz", ".tar")


@dataclass(frozen=True)
class Slice:
    """Where the bytes of a file are."""

    path: str
    offset: int
    size: int

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


class SetFiles:
    """The files of a set by name: the path below the folder or within an archive, with `/`.

    Loose files come before archives, and an archive is opened only if a file is not found among the loose ones. `mark` identifies the
    content of the folder: a hash over every file's name, size and time.
    """

    def __init__(self, folder: Path, archives: Sequence[str] = ()) -> None:
        self.folder = folder
        self.archives: dict[str, Path] = {}
        self._files: dict[str, Slice] = {}
        self._by_base_name: dict[str, list[str]] = {}
        self._links: set[str] = set()
        self._unopened: list[Path] = []
        self._without_end: list[str] = []  # archives without the zeros that end a tar: probably cut off between two files
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
                    self._unopened.append(path)
                else:
                    self._add(inside, Slice(str(path), 0, stat.st_size))
        self.mark = marks.hexdigest()

    def _add(self, name: str, where: Slice) -> None:
        if name not in self._files:
            self._files[name] = where
            self._by_base_name.setdefault(name.rsplit("/", 1)[-1], []).append(name)

    def find_on_disk(self, name: str) -> Path | None:
        """Return the path of the file of that name that lies on disk itself, an archive or not."""
        if name in self.archives:
            return self.archives[name]
        found = [inside for inside in self._by_base_name.get(name, ()) if self._files[inside].path == str(self.folder / inside)]
        return self.folder / min(found, key=len) if found else None

    def find(self, tail: str) -> str | None:
        """Return the name that is `tail` or ends with /`tail`, the shortest of several, or None."""
        while True:
            every = self._by_base_name.get(tail.rsplit("/", 1)[-1], ())
            found = [name for name in every if name == tail or name.endswith("/" + tail)]
            if found:
                return min(found, key=lambda name: (len(name), name))
            if not self._unopened:
                return None
            self._open(self._unopened.pop(0))

    def require(self, tail: str) -> str:
        """Return what `find` returns. Raise an error with the remedy if there is no such file."""
        if (found := self.find(tail)) is None:
            if any(name == tail or name.endswith("/" + tail) for name in self._links):
                raise DataError(f"{self.folder}: {tail} is a link, not a regular file: refused")
            self._check_ends(tail)
            where = f" (looked into {', '.join(self.archives)})" if self.archives else ""
            raise MissingData(
                f"{self.folder} does not hold {tail}{where}; `selfless data fetch {self.folder.name}` says where it comes from"
            )
        return found

    def find_top(self, tail: str) -> str:
        """Return what stands before `tail` in its name: "CUB_200_2011/" for images.txt."""
        return self.require(tail).removesuffix(tail)

    def names(self) -> list[str]:
        """Return every name, sorted. Opens all archives."""
        while self._unopened:
            self._open(self._unopened.pop(0))
        return sorted(self._files)

    def locate(self, name: str, listed_in: str) -> Slice:
        """Return where an image is. Raise Altered if the annotation `listed_in` names it and it is not there."""
        if name not in self._files:
            self.names()
        if name not in self._files:
            self._check_ends(name)
            raise Altered(f"{self.folder}: {listed_in} lists {name}, which is not there; unpack or fetch the images again")
        return self._files[name]

    def _check_ends(self, lacking: str) -> None:
        """Raise Altered if the missing file may have been in a part of an archive that was cut off."""
        if self._without_end:
            raise Altered(f"{self.folder} does not hold {lacking}: {', '.join(self._without_end)} is cut off; delete it and fetch it again")

    def read(self, name: str) -> bytes:
        return self._files[name].read()

    def read_text(self, name: str) -> str:
        try:
            return self.read(name).decode("utf-8")
        except UnicodeDecodeError as error:
            raise Altered(f"{self.folder}: {name} is not text ({error}); fetch it again") from error

    def _open(self, archive: Path) -> None:
        """Add the regular files of an archive."""
        try:
            plain = decompress(archive) if _is_gzip(archive) else archive
            size = plain.stat().st_size
            if any(Slice(str(plain), max(0, size - 512), 512).read()):
                self._without_end.append(archive.name)
            with tarfile.open(plain, "r:") as tar:
                for member in tar:
                    name = check_path(member.name, archive).as_posix()
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


def _is_gzip(archive: Path) -> bool:
    with archive.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def decompressed_dir() -> Path:
    """Return the folder for decompressed archives."""
    return cache_dir() / "objects" / "unpacked"


def _decompressed_path(archive: Path) -> Path:
    stat = archive.stat()
    key = hashlib.sha256(f"{archive.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    return decompressed_dir() / f"{archive.name}.{key}.tar"


def decompress(archive: Path) -> Path:
    """Return the plain tar of a .tgz, in the cache; it is made once."""
    plain = _decompressed_path(archive)
    if plain.is_file():
        return plain
    folder = make_folder(plain.parent)
    free, size = shutil.disk_usage(folder).free, archive.stat().st_size
    if free < 2 * size:
        raise DataError(
            f"unpacking {archive} takes about {size / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} GB are free; make room there"
        )
    with (
        archive.open("rb") as packed,
        progress_bar(f"unpacking {archive.name}", size) as bar,
        gzip.GzipFile(fileobj=packed) as content,
    ):
        copy_pieces(content.read, plain, lambda: bar.move_to(packed.tell()))
    return plain


def remove_decompressed(files: SetFiles) -> None:
    """Remove the decompressed archives of a set from the cache."""
    for archive in files.archives.values():
        _decompressed_path(archive).unlink(missing_ok=True)
