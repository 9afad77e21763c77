"""The IDX format of MNIST and Fashion-MNIST: two zero bytes, a type, a rank, the sizes, the values."""

from __future__ import annotations

import hashlib
import math
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from selfless.data.checksums import Altered, expect, gunzip
from selfless.data.paths import MissingData
from selfless.data.sources.base import Entry, File

Bytes = npt.NDArray[np.uint8]
DIGITS = tuple("0123456789")
ARTICLES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def find(folder: Path, file: File) -> Path | None:
    """The file as published, or (where its content can be checked) unpacked: `train-images-idx3-ubyte` or `.idx3-`."""
    raw = file.name.removesuffix(".gz")
    names = [file.name] if file.content_sha256 is None else [file.name, raw, raw.replace("-idx", ".idx")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def content(folder: Path, file: File) -> bytes:
    """The decompressed, checked content."""
    path = find(folder, file)
    if path is None:
        raise MissingData(f"{folder / file.name} is not there; fetch it with: selfless data fetch")
    data = path.read_bytes()
    if file.content_sha256 is None:
        expect(hashlib.sha256(data).hexdigest(), file.sha256, str(path))
    if path.suffix == ".gz":
        data = gunzip(data, str(path))
    if file.content_sha256 is not None:
        expect(hashlib.sha256(data).hexdigest(), file.content_sha256, str(path))
    return data


def parse(data: bytes, what: str) -> Bytes:
    """An array of bytes out of an IDX file; anything inconsistent in it is `Altered`."""
    if len(data) < 4 or data[:3] != b"\x00\x00\x08" or data[3] not in (1, 3):
        raise Altered(f"{what} does not start like an IDX file of bytes (magic {data[:4].hex() or 'missing'})")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise Altered(f"{what} is cut off within its header")
    shape = struct.unpack(f">{data[3]}I", data[4:start])
    if len(data) - start != math.prod(shape):
        raise Altered(f"{what} should hold {math.prod(shape)} values and holds {len(data) - start}")
    return np.frombuffer(bytearray(data[start:]), dtype=np.uint8).reshape(shape)


def pair(images: bytes, labels: bytes, classes: int, what: str) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """(n, 1, H, W) images and their labels, which must agree in number and lie in range."""
    x, y = parse(images, f"{what} images"), parse(labels, f"{what} labels")
    if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
        raise Altered(f"{what}: images {x.shape} and labels {y.shape} do not belong together")
    if len(y) and int(y.max()) >= classes:
        raise Altered(f"{what}: label {int(y.max())} is out of range; there are {classes} classes")
    return x[:, None], y.astype(np.int64)


def read(folder: Path, item: Entry) -> tuple[tuple[Bytes, npt.NDArray[np.int64]], ...]:
    """(train, test) of a data set made of the four IDX files, in the catalogue's order."""
    parts = [content(folder, file) for file in item.files]
    return tuple(pair(parts[i], parts[i + 1], item.classes, f"{item.name} {kind}") for i, kind in ((0, "train"), (2, "test")))
