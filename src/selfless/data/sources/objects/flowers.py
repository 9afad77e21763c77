"""Oxford Flowers-102: jpg/image_00001.jpg … and two MATLAB files, imagelabels.mat (labels 1 … 102) and setid.mat (trnid, valid, tstid).

Official split: trnid and valid (2,040 images, ten and ten per class) are for training, tstid (6,149) for testing. Ids count from 1, like
the file names.

Also read: folders `train|valid|test/<class>/image_00001.jpg` (the copy of a popular course, as in the public repository
3ba2ii/Flower-Classifier). Its images keep their official numbers, so with setid.mat beside them the split is the official one. Without
it, the split is that of the folders, which trains on nine tenths of all images instead of a quarter: easier, and not comparable.
"""

from __future__ import annotations

import json
import re
from typing import Any

from selfless.data.errors import Altered
from selfless.data.sources.objects import matlab
from selfless.data.sources.objects.base import ObjectSet, published_file
from selfless.data.sources.objects.files import SetFiles
from selfless.data.sources.objects.listing import Item, Listing, parse_vector

CLASSES = 102
OFFICIAL = "official: trnid and valid train, tstid tests"
TREE = re.compile(r"(?:^|/)(train|valid|test)/(\d+)/image_(\d{5})\.jpg$")


def read(files: SetFiles, options: dict[str, Any]) -> Listing:
    """List the images of a copy, in any of the layouts above."""
    return _read_tree(files) if any(TREE.search(name) for name in files.names()) else _read_published(files)


def _read_published(files: SetFiles) -> Listing:
    name, numbers = _read_labels(files)
    ids, second = _read_split(files, len(numbers))
    top = files.find_top(f"image_{ids['train'][0]:05d}.jpg")
    train, test = (tuple(Item(f"{top}image_{i:05d}.jpg", numbers[i - 1] - 1) for i in ids[half]) for half in ("train", "test"))
    return Listing(tuple(f"flower {c}" for c in range(1, CLASSES + 1)), train, test, OFFICIAL, (name, second))


def _read_labels(files: SetFiles) -> tuple[str, list[int]]:
    name = files.require("imagelabels.mat")
    where = f"{files.folder}/imagelabels.mat"
    numbers = parse_vector(matlab.read(files.read(name), ["labels"], where)["labels"], f"{where}: labels")
    for image, label in enumerate(numbers, 1):
        if not 1 <= label <= CLASSES:
            raise Altered(f"{where}: label {label} of image {image} is out of range, which is 1 to {CLASSES}; fetch it again")
    return name, numbers


def _read_split(files: SetFiles, images: int) -> tuple[dict[str, list[int]], str]:
    name = files.require("setid.mat")
    where = f"{files.folder}/setid.mat"
    found = matlab.read(files.read(name), ["trnid", "valid", "tstid"], where)
    parts = {part: parse_vector(found[part], f"{where}: {part}") for part in ("trnid", "valid", "tstid")}
    for part, ids in parts.items():
        if not ids or min(ids) < 1 or max(ids) > images:
            raise Altered(f"{where}: {part} names images out of range, which is 1 to {images}; fetch it again")
    return {"train": sorted(parts["trnid"] + parts["valid"]), "test": sorted(parts["tstid"])}, name


def _read_tree(files: SetFiles) -> Listing:
    found = {name: m for name in files.names() if (m := TREE.search(name))}
    items, part_of, annotations = dict[int, Item](), dict[int, str](), list[str]()
    for name, match in found.items():
        label, image = int(match[2]), int(match[3])
        if not 1 <= label <= CLASSES:
            raise Altered(f"{files.folder}: {name} is in class {label}, which is out of range: 1 to {CLASSES}")
        if image in items and (items[image].label, part_of[image]) != (label - 1, match[1]):
            raise Altered(f"{files.folder}: image {image} is there twice, as {items[image].name} and {name}; fetch the images again")
        items[image], part_of[image] = Item(name, label - 1), match[1]
    if files.find("imagelabels.mat") is not None:  # not needed, but if it is there, the folders must agree with it
        name, numbers = _read_labels(files)
        annotations.append(name)
        for image, item in items.items():
            if image > len(numbers) or numbers[image - 1] != item.label + 1:
                raise Altered(f"{files.folder}: {item.name} is not in the class that imagelabels.mat gives it; fetch the images again")
    if files.find("setid.mat") is not None:
        ids, name = _read_split(files, max(items))
        annotations.append(name)
        if missing := [i for half in ids.values() for i in half if i not in items]:
            raise Altered(f"{files.folder}: setid.mat lists image {missing[0]}, which no folder holds; fetch the images again")
        train, test = (tuple(items[i] for i in ids[half]) for half in ("train", "test"))
        split = OFFICIAL
    else:
        train = tuple(items[i] for i in sorted(items) if part_of[i] != "test")
        test = tuple(items[i] for i in sorted(items) if part_of[i] == "test")
        split = "not the official split: the folders' own, train and valid train (put setid.mat there for the official one)"
    names = _read_names(files)
    if not train or not test:
        counts = f"{len(train)} training and {len(test)} test images"
        raise Altered(f"{files.folder} has {counts}; expected train/<class>/image_00001.jpg and test/<class>/…")
    return Listing(tuple(names.get(str(c), f"flower {c}") for c in range(1, CLASSES + 1)), train, test, split, tuple(annotations))


def _read_names(files: SetFiles) -> dict[str, str]:
    name = files.find("cat_to_name.json")
    try:
        found = {} if name is None else json.loads(files.read_text(name))
    except ValueError as error:
        raise Altered(f"{files.folder}: {name} is not JSON ({error}); fetch it again") from error
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


_OXFORD = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102"

FLOWERS = ObjectSet(
    "flowers",
    "Oxford Flowers-102",
    read,
    (
        published_file("102flowers.tgz", 345, "52808999861908f626f3c1f4e79d11fa", f"{_OXFORD}/102flowers.tgz"),
        published_file("imagelabels.mat", 0.001, "e0620be6f572b9609742df49c70aed4d", f"{_OXFORD}/imagelabels.mat"),
        published_file("setid.mat", 0.015, "a5357ecc9cb78c4bef273ce3793fc85c", f"{_OXFORD}/setid.mat"),
    ),
    CLASSES,
    2040,
    6149,
)
