"""Checksums: what decides whether a file is used."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path

from selfless.data.paths import DataError

CHUNK = 1 << 20


class Altered(DataError):
    """A file that is not what was published: half-written, damaged or changed. It is never used."""


def digest(path: Path, algorithm: str = "sha256") -> str:
    """Hex digest of a file, read in pieces."""
    total = hashlib.new(algorithm)
    with path.open("rb") as f:
        while piece := f.read(CHUNK):
            total.update(piece)
    return total.hexdigest()


def expect(found: str, wanted: str, what: str) -> None:
    """Raises `Altered` unless the two digests agree."""
    if found != wanted:
        raise Altered(
            f"{what} is not the published file: its checksum is {found[:12]}…, expected {wanted[:12]}…; "
            f"delete it and fetch it again (selfless data fetch)"
        )


def gunzip(data: bytes, what: str) -> bytes:
    """Decompressed bytes; a truncated or damaged stream is `Altered`, not a zlib traceback."""
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise Altered(f"{what} is damaged or half-written ({error}); delete it and fetch it again") from error
