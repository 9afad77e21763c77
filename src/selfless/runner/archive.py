"""Many results in one compressed file: `<out>/runs.jsonl.xz`, which `Store` reads as it reads folders.

The file is JSON lines, compressed as one xz stream with a SHA-256 check. The first line is {"format", "keys"}; then comes one line per run,
the content of its metrics.json, in the order of recording. There is one archive per folder of results, not one per experiment, because
experiments share runs and a run is found by its key alone. The texts of a thousand runs are similar, so they compress to a tenth of their
size. They load in about a second; an index in the file would save little of that.
"""

from __future__ import annotations

import functools
import json
import lzma
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from selfless.files import write_bytes

NAME = "runs.jsonl.xz"
FORMAT = 1


def write_archive(path: Path, results: Iterable[Mapping[str, Any]]) -> None:
    """Write the archive of these results (metrics.json as dictionaries), in this order. The same results give the same bytes."""
    lines = {result["key"]: json.dumps(result, separators=(",", ":"), allow_nan=False) for result in results}
    head = json.dumps({"format": FORMAT, "keys": list(lines)}, separators=(",", ":"))
    packed = lzma.compress("\n".join([head, *lines.values(), ""]).encode(), check=lzma.CHECK_SHA256)
    write_bytes(path, packed)


def read_archive(path: Path) -> Mapping[str, str]:
    """Return {key: the JSON of its result} in the order of recording; {} if there is no archive."""
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return MappingProxyType({})
    return _lines(path.absolute(), stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=4)  # a command reads many keys; a file that was written again has another time or size
def _lines(path: Path, changed: int, size: int) -> Mapping[str, str]:
    """Read and check an archive; `changed` and `size` are only part of the cache key."""
    try:
        head, *lines = lzma.decompress(path.read_bytes(), format=lzma.FORMAT_XZ).decode().removesuffix("\n").split("\n")
        about = json.loads(head)
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']}, this version reads {FORMAT}")
        found = dict(zip(about["keys"], lines, strict=True))
        wrong = next((key for key, line in found.items() if not line.startswith(f'{{"key":"{key}",')), None)
        if wrong is not None:
            raise ValueError(f"the line of run {wrong} belongs to another run")
    except (lzma.LZMAError, EOFError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, str(error)) from error
    return MappingProxyType(found)


def damaged(path: Path, reason: str) -> ValueError:
    """Return the error for an archive that cannot be read."""
    return ValueError(
        f"{path} is not a readable archive of results ({reason}). Restore it from a copy (git checkout -- {path.name}), "
        "or delete it and train its runs again"
    )
