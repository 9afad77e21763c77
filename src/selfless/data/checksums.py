"""Checksums and checked decompression: they decide whether a file is used."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path

from selfless.data.errors import Altered

CHUNK = 1 << 20


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """Return the hex digest of a file. Reads it in pieces, so it may be larger than memory."""
    total = hashlib.new(algorithm)
    with path.open("rb") as f:
        while piece := f.read(CHUNK):
            total.update(piece)
    return total.hexdigest()


def require_digest(found: str, wanted: str, what: str) -> None:
    """Raise Altered unless the two digests are equal."""
    if found != wanted:
        raise Altered(
            f"{what} is not the published file: its checksum is {found[:12]}…, expected {wanted[:12]}…; "
            f"delete it and fetch it again (selfless data fetch)"
        )


def gunzip(data: bytes, what: str) -> bytes:
    """Decompress gzip data. Raise Altered if it is truncated or damaged."""
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise Altered(f"{what} is damaged or half-written ({error}); delete it and fetch it again") from error
