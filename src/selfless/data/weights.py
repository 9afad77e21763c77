"""Pretrained weights by name and digest, `alexnet-owt-7be5be79.pth@7be5be791159`, for `model_options`: the same run on every machine.

The file is looked for in a folder named after its network (`alexnet/`) below the data folders, and must be the one the digest says: the
first twelve hexadecimal digits of its SHA-256. A run may also name a file of one's own by its path.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfless.data.checksums import Altered, digest
from selfless.data.paths import MissingData, data_dir, roots

DIGITS = 12
KNOWN = {  # the most complete first; the digits in torchvision's names are its own checksum
    "alexnet": (
        "alexnet-owt-7be5be79.pth",
        "alexnet-owt-4df8aa71.pth",
        "alexnet.pth",
        "alexnet.safetensors",
        "alexnet_imagenet_features.npz",
    )
}
NAMED = re.compile(r"[^/\\@]+@[0-9a-f]{12}")


def pretrained(network: str, where: Path | str | None = None) -> str | None:
    """NAME@DIGEST of the most complete known file of a network that is here; None where there is none. `Altered` if it is not the published
    one."""
    for name in KNOWN.get(network, ()):
        for root in roots(where):
            path = root / network / name
            if path.is_file():
                found = checksum(path)
                published = re.fullmatch(r".*-([0-9a-f]{8})\.pth", name)
                if published and not found.startswith(published[1]):
                    raise Altered(f"{path} is damaged or another file: its SHA-256 begins {found[:8]}; fetch it again")
                return f"{name}@{found[:DIGITS]}"
    return None


def located(network: str, options: Mapping[str, Any], where: Path | str | None = None) -> dict[str, Any]:
    """The options with the path of the file in place of its name and digest; options that name no such file as they are."""
    given = options.get("weights")
    if not isinstance(given, str) or not NAMED.fullmatch(given):
        return dict(options)
    name, _, wanted = given.partition("@")
    there = [path for root in roots(where) if (path := root / network / name).is_file()]
    for path in there:
        if checksum(path).startswith(wanted):
            return {**options, "weights": str(path)}
    if there:
        raise Altered(f"{there[0]} is not the file this run was made with: its SHA-256 begins {checksum(there[0])[:DIGITS]}, not {wanted}")
    raise MissingData(
        f"the weights {name} are not here; put the file into {data_dir(where) / network}, or point SELFLESS_DATA at a folder with it"
    )


def checksum(path: Path) -> str:
    """SHA-256 of a file, read once as long as it stays as it is."""
    stat = path.stat()
    return _checksum(str(path.resolve()), stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _checksum(path: str, size: int, changed: int) -> str:
    return digest(Path(path))
