"""Stanford Cars: cars_train/ and cars_test/, cars_train_annos.mat and cars_meta.mat of the devkit, and cars_test_annos_withlabels.mat.

Official split: 8,144 training and 8,041 test images. The devkit's own cars_test_annos.mat has no labels, so the test half needs the file
that was published beside it. Whole images by default; `boxes=True` crops each to its car (bbox_x1 … bbox_y2 count from 1, both ends
included).

Also read: the same images as one archive, car_ims.tgz with cars_annos.mat, whose annotations say which of them test.

Also read: the training half alone with the devkit's train_perfect_preds.txt, one class number a line (as in the public repository
fmejbah/car_dataset1, whose images are already cropped); a fixed fifth of every class then tests, which is not the official test set.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from selfless.data.checksums import Altered
from selfless.data.sources.objects import matlab
from selfless.data.sources.objects.files import Shelf
from selfless.data.sources.objects.listing import Item, Listing, halves, number


def read(shelf: Shelf, options: dict[str, Any]) -> Listing:
    if shelf.find("cars_meta.mat") is None and shelf.find("cars_annos.mat") is not None:
        return _together(shelf, options["boxes"])
    meta = shelf.need("cars_meta.mat")
    names = _names(matlab.read(shelf.read(meta), ["class_names"], f"{shelf.folder}/cars_meta.mat"), f"{shelf.folder}/cars_meta.mat")
    if shelf.find("cars_train_annos.mat") is None and shelf.find("train_perfect_preds.txt") is not None:
        return _training_half(shelf, tuple(names), meta, options)
    train, first = _half(shelf, "cars_train_annos.mat", "cars_train", len(names), options["boxes"])
    test, second = _half(shelf, "cars_test_annos_withlabels.mat", "cars_test", len(names), options["boxes"])
    return Listing(tuple(names), train, test, "official: cars_train and cars_test", (meta, first, second))


def _names(found: dict[str, Any], where: str) -> list[str]:
    names = found["class_names"]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise Altered(f"{where}: class_names should be a cell of names; fetch it again")
    return names


def _together(shelf: Shelf, boxes: bool) -> Listing:
    name, where = shelf.need("cars_annos.mat"), f"{shelf.folder}/cars_annos.mat"
    found = matlab.read(shelf.read(name), ["annotations", "class_names"], where)
    names, rows = _names(found, where), _rows(found["annotations"], where, ("class", "relative_im_path", "test"))
    top = shelf.top(f"car_ims/{_base(rows[0]['relative_im_path'])}")
    halves_of: tuple[list[Item], list[Item]] = ([], [])
    for row in rows:
        file = _base(row["relative_im_path"])
        half = halves_of[number(str(_scalar(row["test"], where, file)), f"{where}: test of {file}", 0, 1)]
        half.append(_item(f"{top}car_ims/{file}", row, where, len(names), boxes))
    return Listing(tuple(names), tuple(halves_of[0]), tuple(halves_of[1]), "official: cars_annos.mat", (name,))


def _half(shelf: Shelf, name: str, images: str, classes: int, boxes: bool) -> tuple[tuple[Item, ...], str]:
    found, where = shelf.need(name), f"{shelf.folder}/{name}"
    rows = _rows(matlab.read(shelf.read(found), ["annotations"], where)["annotations"], where, ("class", "fname"))
    top = shelf.top(f"{images}/{_base(rows[0]['fname'])}")
    return tuple(_item(f"{top}{images}/{_base(row['fname'])}", row, where, classes, boxes) for row in rows), found


def _rows(annotations: Any, where: str, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    if not isinstance(annotations, list) or not annotations or not isinstance(annotations[0], dict):
        raise Altered(f"{where}: annotations should be a struct; fetch it again")
    if missing := [field for field in fields if field not in annotations[0]]:
        has = ", ".join(annotations[0])
        raise Altered(
            f"{where} has no {' and no '.join(missing)} (its fields are {has}); fetch the file that has: test labels are in one apart"
        )
    return annotations


def _item(name: str, row: dict[str, Any], where: str, classes: int, boxes: bool) -> Item:
    file = _base(name)
    corners = [_scalar(row.get(f"bbox_{corner}"), where, file) for corner in ("x1", "y1", "x2", "y2")] if boxes else None
    box = None if corners is None else (corners[0] - 1.0, corners[1] - 1.0, float(corners[2]), float(corners[3]))
    return Item(name, number(str(_scalar(row["class"], where, file)), f"{where}: class of {file}", 1, classes) - 1, box)


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
