"""Stanford Cars: cars_train/ and cars_test/, cars_train_annos.mat and cars_meta.mat of the devkit, and cars_test_annos_withlabels.mat.

Official split: 8,144 training and 8,041 test images. The devkit's own cars_test_annos.mat has no labels, so the test images need the
other file, cars_test_annos_withlabels.mat. Images are whole by default; `boxes=True` crops each to its car (bbox_x1 … bbox_y2 count from
1, both ends included).

Also read: the same images as one archive, car_ims.tgz with cars_annos.mat, whose annotations say which images are for testing.

Also read: the training half alone with the devkit's train_perfect_preds.txt, one class number per line (as in the public repository
fmejbah/car_dataset1, whose images are already cropped). A fixed fifth of every class is then used for testing, which is not the official
test set.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from selfless.data.errors import Altered
from selfless.data.sources.objects import matlab
from selfless.data.sources.objects.base import ObjectSet, published_file
from selfless.data.sources.objects.files import SetFiles
from selfless.data.sources.objects.listing import Item, Listing, parse_number, split_items


def read(files: SetFiles, options: dict[str, Any]) -> Listing:
    """List the images of a copy, in any of the layouts above."""
    if files.find("cars_meta.mat") is None and files.find("cars_annos.mat") is not None:
        return _read_together(files, options["boxes"])
    meta = files.require("cars_meta.mat")
    names = _check_names(matlab.read(files.read(meta), ["class_names"], f"{files.folder}/cars_meta.mat"), f"{files.folder}/cars_meta.mat")
    if files.find("cars_train_annos.mat") is None and files.find("train_perfect_preds.txt") is not None:
        return _read_training_half(files, tuple(names), meta, options)
    train, first = _read_half(files, "cars_train_annos.mat", "cars_train", len(names), options["boxes"])
    test, second = _read_half(files, "cars_test_annos_withlabels.mat", "cars_test", len(names), options["boxes"])
    return Listing(tuple(names), train, test, "official: cars_train and cars_test", (meta, first, second))


def _check_names(found: dict[str, Any], where: str) -> list[str]:
    names = found["class_names"]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise Altered(f"{where}: class_names should be a cell of names; fetch it again")
    return names


def _read_together(files: SetFiles, boxes: bool) -> Listing:
    """Read the images in one archive, whose annotations say which images are for testing."""
    name, where = files.require("cars_annos.mat"), f"{files.folder}/cars_annos.mat"
    found = matlab.read(files.read(name), ["annotations", "class_names"], where)
    names, rows = _check_names(found, where), _check_rows(found["annotations"], where, ("class", "relative_im_path", "test"))
    top = files.find_top(f"car_ims/{_base_name(rows[0]['relative_im_path'])}")
    halves: tuple[list[Item], list[Item]] = ([], [])
    for row in rows:
        file = _base_name(row["relative_im_path"])
        half = halves[parse_number(str(_parse_scalar(row["test"], where, file)), f"{where}: test of {file}", 0, 1)]
        half.append(_make_item(f"{top}car_ims/{file}", row, where, len(names), boxes))
    return Listing(tuple(names), tuple(halves[0]), tuple(halves[1]), "official: cars_annos.mat", (name,))


def _read_half(files: SetFiles, name: str, images: str, classes: int, boxes: bool) -> tuple[tuple[Item, ...], str]:
    found, where = files.require(name), f"{files.folder}/{name}"
    rows = _check_rows(matlab.read(files.read(found), ["annotations"], where)["annotations"], where, ("class", "fname"))
    top = files.find_top(f"{images}/{_base_name(rows[0]['fname'])}")
    return tuple(_make_item(f"{top}{images}/{_base_name(row['fname'])}", row, where, classes, boxes) for row in rows), found


def _check_rows(annotations: Any, where: str, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    if not isinstance(annotations, list) or not annotations or not isinstance(annotations[0], dict):
        raise Altered(f"{where}: annotations should be a struct; fetch it again")
    if missing := [field for field in fields if field not in annotations[0]]:
        has = ", ".join(annotations[0])
        raise Altered(
            f"{where} has no {' and no '.join(missing)} (its fields are {has}); fetch the file that has: test labels are in another one"
        )
    return annotations


def _make_item(name: str, row: dict[str, Any], where: str, classes: int, boxes: bool) -> Item:
    file = _base_name(name)
    corners = [_parse_scalar(row.get(f"bbox_{corner}"), where, file) for corner in ("x1", "y1", "x2", "y2")] if boxes else None
    box = None if corners is None else (corners[0] - 1.0, corners[1] - 1.0, float(corners[2]), float(corners[3]))
    return Item(name, parse_number(str(_parse_scalar(row["class"], where, file)), f"{where}: class of {file}", 1, classes) - 1, box)


def _base_name(name: Any) -> str:
    return str(name).replace("\\", "/").rsplit("/", 1)[-1]


def _parse_scalar(value: Any, where: str, file: str) -> int:
    array = np.asarray(value if value is not None else [])
    if array.size != 1 or array.dtype.kind not in "iuf":
        raise Altered(f"{where}: an annotation of {file} is not a number; fetch it again")
    return int(array.item())


def _read_training_half(files: SetFiles, names: tuple[str, ...], meta: str, options: dict[str, Any]) -> Listing:
    """Read the training half alone; a fixed fifth of every class is used for testing."""
    if options["boxes"]:
        raise Altered(f"{files.folder} has no bounding boxes (cars_train_annos.mat); use boxes=False, or put the devkit there")
    labels = files.require("train_perfect_preds.txt")
    lines = files.read_text(labels).split()
    top = files.find_top("cars_train/00001.jpg")
    where = f"{files.folder}: {labels}"
    items = [Item(f"{top}cars_train/{i:05d}.jpg", parse_number(c, f"{where}, line {i}", 1, len(names)) - 1) for i, c in enumerate(lines, 1)]
    train, test = split_items(items, "cars")
    split = "not the official split: a fixed fifth of every class of the training images tests"
    return Listing(names, train, test, split, (meta, labels))


CARS = ObjectSet(
    "cars",
    "Stanford Cars",
    read,
    (
        published_file("cars_train.tgz", 979, "065e5b463ae28d29e77c1b4b166cfe61"),
        published_file("cars_test.tgz", 977, "4ce7ebf6a94d07f1952d94dd34c4d501"),
        published_file("car_devkit.tgz", 0.3, "c3b158d763b6e2245038c8ad08e45376"),
        published_file("cars_test_annos_withlabels.mat", 0.2, "b0a2b23655a3edd16d84508592a98d10"),
    ),
    196,
    8144,
    8041,
    also=("car_ims.tgz",),
    options=("boxes",),
    hint="the set's own page (ai.stanford.edu/~jkrause/cars) no longer serves them; copies exist, on Kaggle for one",
)
