"""CIFAR-100's binary release: records of one coarse label, one fine label and 3·32·32 pixels. No pickle."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from selfless.data.archives import untar
from selfless.data.checksums import Altered, expect
from selfless.data.paths import MissingData, cache_dir, workshop

FOLDER = "cifar-100-binary"
ARCHIVES = (f"{FOLDER}.tar.gz", f"{FOLDER}.tar.xz", f"{FOLDER}.tgz", f"{FOLDER}.tar")
NAMES = "fine_label_names.txt"
CHECKSUMS = {  # the published MD5, and the SHA-256 of the very same bytes
    "train.bin": ("6172c7755cfe09b2fe270c85cebc1b15", "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
    "test.bin": ("4499cfba6c016c1be1438163640a0898", "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
}
MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
RECORD = 2 + 3 * 32 * 32

Split = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


def find(root: Path) -> Path | None:
    """The unpacked folder or an archive of it, below `root`; what is unpacked costs nothing, so it comes first."""
    folders = [place for place in (root / FOLDER, root) if all((place / name).is_file() for name in (*CHECKSUMS, NAMES))]
    return next(iter([*folders, *(root / name for name in ARCHIVES if (root / name).is_file())]), None)


def unpacked(root: Path, *, again: bool = False) -> tuple[Path, bool]:
    """A folder with the unpacked records, and whether they were unpacked just now.

    Decoding an .xz takes many seconds, so it happens once, into the cache: the records are checked by their published
    checksums whenever they are read, so it does not matter which archive they came out of.
    """
    found = find(root)
    if found is None:
        raise MissingData(f"no {ARCHIVES[0]} in {root}; fetch it with: selfless data fetch cifar-100")
    if found.is_dir():
        return found, True
    folder = cache_dir() / "unpacked" / FOLDER
    if not again and all((folder / name).is_file() for name in (*CHECKSUMS, NAMES)):
        return folder, False
    with workshop(folder) as place:
        untar(found, (*CHECKSUMS, NAMES), place)
        for name in (*CHECKSUMS, NAMES):
            (place / name).replace(folder / name)
    return folder, True


def records(data: bytes, what: str) -> Split:
    """(n, 3, 32, 32) images and their fine labels."""
    if not data or len(data) % RECORD:
        raise Altered(f"{what} is cut off: {len(data)} bytes are no whole number of records of {RECORD}")
    table = np.frombuffer(data, dtype=np.uint8).reshape(-1, RECORD)
    labels = table[:, 1].astype(np.int64)
    if labels.max() > 99 or table[:, 0].max() > 19:
        raise Altered(f"{what} holds a label out of range (fine {labels.max()}, coarse {table[:, 0].max()})")
    return np.ascontiguousarray(table[:, 2:]).reshape(-1, 3, 32, 32), labels


def read(root: Path, *, again: bool = False) -> tuple[Split, Split, tuple[str, ...]]:
    """(train, test, class names), every byte of it checked. `again` reads the archive even if it is unpacked."""
    folder, fresh = unpacked(root, again=again)
    try:
        return _read(folder)
    except Altered:
        if fresh:
            raise
    return _read(unpacked(root, again=True)[0])  # a damaged cache is no reason to fail


def _read(folder: Path) -> tuple[Split, Split, tuple[str, ...]]:
    def split(name: str) -> Split:
        data = (folder / name).read_bytes()
        expect(hashlib.md5(data, usedforsecurity=False).hexdigest(), CHECKSUMS[name][0], str(folder / name))
        expect(hashlib.sha256(data).hexdigest(), CHECKSUMS[name][1], str(folder / name))
        return records(data, str(folder / name))

    names = tuple((folder / NAMES).read_text().split())
    if len(names) != 100:
        raise Altered(f"{folder / NAMES} should name 100 classes and names {len(names)}")
    return split("train.bin"), split("test.bin"), names
