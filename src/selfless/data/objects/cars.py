"""Stanford Cars: cars_train/ and cars_test/, cars_train_annos.mat and cars_meta.mat of the devkit, and cars_test_annos_withlabels.mat.

Official split: 8,144 training and 8,041 test images. The devkit's own cars_test_annos.mat has no labels, so the test half needs the file
that was published beside it. Whole images by default; `boxes=True` crops each to its car (bbox_x1 … bbox_y2 count from 1, both ends
included).

Also read: the training half alone with the devkit's train_perfect_preds.txt, one class number a line (as in the public repository
fmejbah/car_dataset1, whose images are already cropped); a fixed fifth of every class then tests, which is not the official test set.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from selfless.data.checking import Altered
from selfless.data.objects import matlab
from selfless.data.objects.listing import Item, Listing, halves, number
from selfless.data.objects.shelf import Shelf


def read(shelf: Shelf, options: dict[str, Any]) -> Listing:
    meta = shelf.need("cars_meta.mat")
    names = matlab.read(shelf.read(meta), ["class_names"], f"{shelf.folder}/cars_meta.mat")["class_names"]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise Altered(f"{shelf.folder}/cars_meta.mat: class_names should be a cell of names; fetch it again")
    if shelf.find("cars_train_annos.mat") is None and shelf.find("train_perfect_preds.txt") is not None:
        return _training_half(shelf, tuple(names), meta, options)
    train, first = _half(shelf, "cars_train_annos.mat", "cars_train", len(names), options["boxes"])
    test, second = _half(shelf, "cars_test_annos_withlabels.mat", "cars_test", len(names), options["boxes"])
    return Listing(tuple(names), train, test, "official: cars_train and cars_test", (meta, first, second))


def _half(shelf: Shelf, name: str, images: str, classes: int, boxes: bool) -> tuple[tuple[Item, ...], str]:
    found, items = shelf.need(name), []
    where = f"{shelf.folder}/{name}"
    annotations = matlab.read(shelf.read(found), ["annotations"], where)["annotations"]
    if not isinstance(annotations, list) or not annotations or not isinstance(annotations[0], dict):
        raise Altered(f"{where}: annotations should be a struct; fetch it again")
    if "class" not in annotations[0] or "fname" not in annotations[0]:
        raise Altered(f"{where} has no labels (its fields are {', '.join(annotations[0])}); fetch {name} of the published set")
    top = shelf.top(f"{images}/{_base(annotations[0]['fname'])}")
    for row in annotations:
        file = _base(row["fname"])
        corners = [_scalar(row.get(f"bbox_{corner}"), where, file) for corner in ("x1", "y1", "x2", "y2")] if boxes else None
        box = None if corners is None else (corners[0] - 1.0, corners[1] - 1.0, float(corners[2]), float(corners[3]))
        label = number(str(_scalar(row["class"], where, file)), f"{where}: class of {file}", 1, classes) - 1
        items.append(Item(f"{top}{images}/{file}", label, box))
    return tuple(items), found


def _base(name: Any) -> str:
    return str(name).replace("\\", "/").rsplit("/", 1)[-1]


def _scalar(value: Any, where: str, file: str) -> int:
    array = np.asarray(value if value is not None else [])
    if array.size != 1 or array.dtype.kind not in "iuf":
        raise Altered(f"{where}: an annotation of {file} is not a number; fetch it again")
    return int(array.item())


def _training_half(shelf: Shelf, names: tuple[str, ...], meta: str, options: dict[str, Any]) -> Listing:
    if options["boxes"]:
        raise Altered(f"{shelf.folder} has no bounding boxes (cars_train_annos.mat); use boxes=False, or put the devkit there")
    labels = shelf.need("train_perfect_preds.txt")
    lines = shelf.text(labels).split()
    top = shelf.top("cars_train/00001.jpg")
    where = f"{shelf.folder}: {labels}"
    items = [Item(f"{top}cars_train/{i:05d}.jpg", number(c, f"{where}, line {i}", 1, len(names)) - 1) for i, c in enumerate(lines, 1)]
    train, test = halves(items, "cars")
    split = "not the official split: a fixed fifth of every class of the training images tests"
    return Listing(names, train, test, split, (meta, labels))
