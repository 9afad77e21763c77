"""SVHN, cropped digits: train_32x32.mat and test_32x32.mat, each X (32, 32, 3, n) bytes and y (n, 1), where 10 is the digit 0.

Official split: 73,257 training and 26,032 test images. The extra images are not used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from selfless.data.errors import Altered
from selfless.data.sources.objects import matlab
from selfless.data.sources.objects.base import ObjectSet, published_file
from selfless.data.sources.objects.files import SetFiles
from selfless.data.sources.objects.listing import Item, Listing, parse_vector

FILES = ("train_32x32.mat", "test_32x32.mat")


def read(files: SetFiles, options: dict[str, Any]) -> Listing:
    """List the images of a copy, in the layout above."""
    names = tuple(files.require(name) for name in FILES)
    pictures, items = zip(*(_read_half(files, name) for name in names), strict=True)
    split = "official: train and test, without extra"
    return Listing(tuple("0123456789"), items[0], items[1], split, names, np.concatenate(pictures))


def _read_half(files: SetFiles, name: str) -> tuple[npt.NDArray[np.uint8], tuple[Item, ...]]:
    where = f"{files.folder}/{name}"
    found = matlab.read(files.read(name), ["X", "y"], where)
    x, labels = np.asarray(found["X"]), parse_vector(found["y"], f"{where}: y")
    if x.ndim != 4 or x.shape[2] != 3 or x.dtype != np.uint8 or x.shape[3] != len(labels):
        raise Altered(f"{where}: X is {x.dtype} {x.shape} for {len(labels)} labels, not bytes (32, 32, 3, n); fetch it again")
    if wrong := [y for y in labels if not 1 <= y <= 10]:
        raise Altered(f"{where}: label {wrong[0]} is out of range, which is 1 to 10; fetch it again")
    return np.ascontiguousarray(x.transpose(3, 0, 1, 2)), tuple(Item(f"{name}, picture {i}", y % 10) for i, y in enumerate(labels, 1))


_SVHN = "http://ufldl.stanford.edu/housenumbers"

SVHN = ObjectSet(
    "svhn",
    "Street View House Numbers",
    read,
    (
        published_file("train_32x32.mat", 182, "e26dedcc434d2e4c54c9b2d4a06d8373", f"{_SVHN}/train_32x32.mat"),
        published_file("test_32x32.mat", 64, "eb5a983be6a315427106f1b164d9cef3", f"{_SVHN}/test_32x32.mat"),
    ),
    10,
    73257,
    26032,
)
