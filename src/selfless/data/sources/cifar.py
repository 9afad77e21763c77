"""CIFAR-100 in its binary release: records of one coarse label, one fine label and 3·32·32 pixels. Nothing is unpickled."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from selfless.data.archives import untar
from selfless.data.checksums import require_digest
from selfless.data.errors import Altered, MissingData
from selfless.data.paths import cache_dir
from selfless.data.sources.base import Check, Entry, File, Images, Labels, Source, to_tensors

FOLDER = "cifar-100-binary"
ARCHIVES = (f"{FOLDER}.tar.gz", f"{FOLDER}.tar.xz", f"{FOLDER}.tgz", f"{FOLDER}.tar")
NAMES = "fine_label_names.txt"
CHECKSUMS = {  # the published MD5, and the SHA-256 of the same bytes
    "train.bin": ("6172c7755cfe09b2fe270c85cebc1b15", "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
    "test.bin": ("4499cfba6c016c1be1438163640a0898", "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
}
MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
RECORD = 2 + 3 * 32 * 32

Half = tuple[Images, Labels]


@dataclass(frozen=True)
class Cifar100(Entry):
    """CIFAR-100, unpacked or in an archive."""

    def is_in(self, folder: Path) -> bool:
        return find_files(folder) is not None

    def read(self, place: Path) -> Source:
        train, test, names = read_records(place)
        return Source(self.name, to_tensors(train), to_tensors(test), names, MEAN, STD, None, self.classes_per_task)

    def check(self, place: Path) -> Check:
        read_records(place, again=True)
        return Check(self.name, "ok", place, "checksums as published")


def find_files(root: Path) -> Path | None:
    """Return the unpacked folder in `root`, else an archive of it, else None."""
    folders = [place for place in (root / FOLDER, root) if all((place / name).is_file() for name in (*CHECKSUMS, NAMES))]
    return next(iter([*folders, *(root / name for name in ARCHIVES if (root / name).is_file())]), None)


def unpack(root: Path, *, again: bool = False) -> tuple[Path, bool]:
    """Return a folder with the unpacked records, and False if they were taken from the cache.

    Decompressing an .xz takes many seconds, so it is done once, into the cache. The records are checked by the published checksums
    whenever they are read, so it does not matter from which archive they came.
    """
    found = find_files(root)
    if found is None:
        raise MissingData(f"no {ARCHIVES[0]} in {root}; fetch it with: selfless data fetch cifar-100")
    if found.is_dir():
        return found, True
    folder = cache_dir() / "unpacked" / FOLDER
    if not again and all((folder / name).is_file() for name in (*CHECKSUMS, NAMES)):
        return folder, False
    untar(found, (*CHECKSUMS, NAMES), folder)
    return folder, True


def parse(data: bytes, what: str) -> Half:
    """Return the images (n, 3, 32, 32) and fine labels of a file of records."""
    if not data or len(data) % RECORD:
        raise Altered(f"{what} is cut off: {len(data)} bytes are not a whole number of records of {RECORD}")
    table = np.frombuffer(data, dtype=np.uint8).reshape(-1, RECORD)
    labels = table[:, 1].astype(np.int64)
    if labels.max() > 99 or table[:, 0].max() > 19:
        raise Altered(f"{what} holds a label out of range (fine {labels.max()}, coarse {table[:, 0].max()})")
    return np.ascontiguousarray(table[:, 2:]).reshape(-1, 3, 32, 32), labels


def read_records(root: Path, *, again: bool = False) -> tuple[Half, Half, tuple[str, ...]]:
    """Return (train, test, class names), with every byte checked. `again`: read the archive even if it is unpacked."""
    folder, fresh = unpack(root, again=again)
    try:
        return _read_folder(folder)
    except Altered:
        if fresh:
            raise
    return _read_folder(unpack(root, again=True)[0])  # the copy in the cache was damaged


def _read_folder(folder: Path) -> tuple[Half, Half, tuple[str, ...]]:
    def read(name: str) -> Half:
        data = (folder / name).read_bytes()
        require_digest(hashlib.md5(data, usedforsecurity=False).hexdigest(), CHECKSUMS[name][0], str(folder / name))
        require_digest(hashlib.sha256(data).hexdigest(), CHECKSUMS[name][1], str(folder / name))
        return parse(data, str(folder / name))

    names = tuple((folder / NAMES).read_text().split())
    if len(names) != 100:
        raise Altered(f"{folder / NAMES} should name 100 classes and names {len(names)}")
    return read("train.bin"), read("test.bin"), names


CIFAR_100 = Cifar100(
    "cifar-100",
    "small photographs",
    "",
    (
        File(
            "cifar-100-binary.tar.gz",
            168513733,
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
        ),
    ),
    train=50000,
    test=10000,
    classes=100,
    shape=(3, 32, 32),
    classes_per_task=10,
)
