"""Pretrained weights by name and digest, such as `alexnet-owt-7be5be79.pth@7be5be791159`, so that a run is the same on every machine.

The file is looked up in a folder named after its network (`alexnet/`) below the data folders. The digest is the first twelve
hexadecimal digits of its SHA-256. A run may also name a file by its path.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfless.data.checksums import file_digest
from selfless.data.errors import Altered, MissingData
from selfless.data.paths import data_dir, data_dirs

DIGITS = 12
KNOWN = {  # the most complete first; torchvision writes the first eight digits of the SHA-256 into the name
    "alexnet": (
        "alexnet-owt-7be5be79.pth",
        "alexnet-owt-4df8aa71.pth",
        "alexnet.pth",
        "alexnet.safetensors",
        "alexnet_imagenet_features.npz",
    )
}
NAME_AND_DIGEST = re.compile(r"[^/\\@]+@[0-9a-f]{12}")


def find_pretrained(network: str, where: Path | str | None = None) -> str | None:
    """Return NAME@DIGEST of the most complete known file of a network on this machine, or None.

    Raise Altered if the file is not the one that its name promises.
    """
    for name in KNOWN.get(network, ()):
        for root in data_dirs(where):
            path = root / network / name
            if path.is_file():
                found = checksum(path)
                published = re.fullmatch(r".*-([0-9a-f]{8})\.pth", name)
                if published and not found.startswith(published[1]):
                    raise Altered(f"{path} is damaged or another file: its SHA-256 begins {found[:8]}; fetch it again")
                return f"{name}@{found[:DIGITS]}"
    return None


def locate_weights(network: str, options: Mapping[str, Any], where: Path | str | None = None) -> dict[str, Any]:
    """Return the model options with NAME@DIGEST replaced by the path of that file; other options are returned unchanged."""
    given = options.get("weights")
    if not isinstance(given, str) or not NAME_AND_DIGEST.fullmatch(given):
        return dict(options)
    name, _, wanted = given.partition("@")
    found = [path for root in data_dirs(where) if (path := root / network / name).is_file()]
    for path in found:
        if checksum(path).startswith(wanted):
            return {**options, "weights": str(path)}
    if found:
        raise Altered(
            f"{found[0]} is not the file this run was made with: its SHA-256 begins {checksum(found[0])[:DIGITS]}, not {wanted}; "
            "replace it by that file"
        )
    raise MissingData(
        f"the weights {name} were not found; put the file into {data_dir(where) / network}, or point SELFLESS_DATA at a folder with it"
    )


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file. It is computed once per size and time of the file."""
    stat = path.stat()
    return _checksum(str(path.resolve()), stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _checksum(path: str, size: int, changed: int) -> str:
    return file_digest(Path(path))
