"""Oxford Flowers-102: jpg/image_00001.jpg … and two MATLAB files, imagelabels.mat (labels 1 … 102) and setid.mat (trnid, valid, tstid).

Official split: trnid and valid (2,040 images, ten and ten a class) train, tstid (6,149) tests. MATLAB's ids count from 1, as the files do.

Also read: a tree `train|valid|test/<class>/image_00001.jpg` (a popular course's copy, as in the public repository
3ba2ii/Flower-Classifier). Its images keep their official numbers: with setid.mat beside them the split is the official one; without, it
is the tree's own, which trains on nine tenths of all images instead of a quarter: easier, and not comparable.
"""

from __future__ import annotations

import json
import re
from typing import Any

from selfless.data.checksums import Altered
from selfless.data.sources.objects import matlab
from selfless.data.sources.objects.files import Shelf
from selfless.data.sources.objects.listing import Item, Listing, column

CLASSES = 102
OFFICIAL = "official: trnid and valid train, tstid tests"
TREE = re.compile(r"(?:^|/)(train|valid|test)/(\d+)/image_(\d{5})\.jpg$")


def read(shelf: Shelf, options: dict[str, Any]) -> Listing:
    return _tree(shelf) if any(TREE.search(name) for name in shelf.names()) else _published(shelf)


def _published(shelf: Shelf) -> Listing:
    name, numbers = _labels(shelf)
    ids, second = _official(shelf, len(numbers))
    top = shelf.top(f"image_{ids['train'][0]:05d}.jpg")
    train, test = (tuple(Item(f"{top}image_{i:05d}.jpg", numbers[i - 1] - 1) for i in ids[half]) for half in ("train", "test"))
    return Listing(tuple(f"flower {c}" for c in range(1, CLASSES + 1)), train, test, OFFICIAL, (name, second))


def _labels(shelf: Shelf) -> tuple[str, list[int]]:
    name = shelf.need("imagelabels.mat")
    where = f"{shelf.folder}/imagelabels.mat"
    numbers = column(matlab.read(shelf.read(name), ["labels"], where)["labels"], f"{where}: labels")
    for image, label in enumerate(numbers, 1):
        if not 1 <= label <= CLASSES:
            raise Altered(f"{where}: label {label} of image {image} is out of range, which is 1 to {CLASSES}; fetch it again")
    return name, numbers


def _official(shelf: Shelf, images: int) -> tuple[dict[str, list[int]], str]:
    name = shelf.need("setid.mat")
    where = f"{shelf.folder}/setid.mat"
    found = matlab.read(shelf.read(name), ["trnid", "valid", "tstid"], where)
    parts = {part: column(found[part], f"{where}: {part}") for part in ("trnid", "valid", "tstid")}
    for part, ids in parts.items():
        if not ids or min(ids) < 1 or max(ids) > images:
            raise Altered(f"{where}: {part} names images out of range, which is 1 to {images}; fetch it again")
    return {"train": sorted(parts["trnid"] + parts["valid"]), "test": sorted(parts["tstid"])}, name


def _tree(shelf: Shelf) -> Listing:
    found = {name: m for name in shelf.names() if (m := TREE.search(name))}
    items, part_of, notes = dict[int, Item](), dict[int, str](), list[str]()
    for name, match in found.items():
        label, image = int(match[2]), int(match[3])
        if not 1 <= label <= CLASSES:
            raise Altered(f"{shelf.folder}: {name} is in class {label}, which is out of range: 1 to {CLASSES}")
        if image in items and (items[image].label, part_of[image]) != (label - 1, match[1]):
            raise Altered(f"{shelf.folder}: image {image} is there twice, as {items[image].name} and {name}; fetch the images again")
        items[image], part_of[image] = Item(name, label - 1), match[1]
    if shelf.find("imagelabels.mat") is not None:  # not needed; where it is there, the folders must agree with it
        name, numbers = _labels(shelf)
        notes.append(name)
        for image, item in items.items():
            if image > len(numbers) or numbers[image - 1] != item.label + 1:
                raise Altered(f"{shelf.folder}: {item.name} is not in the class that imagelabels.mat gives it; fetch the images again")
    if shelf.find("setid.mat") is not None:
        ids, name = _official(shelf, max(items))
        notes.append(name)
        if missing := [i for half in ids.values() for i in half if i not in items]:
            raise Altered(f"{shelf.folder}: setid.mat lists image {missing[0]}, which no folder holds; fetch the images again")
        train, test = (tuple(items[i] for i in ids[half]) for half in ("train", "test"))
        split = OFFICIAL
    else:
        train = tuple(items[i] for i in sorted(items) if part_of[i] != "test")
        test = tuple(items[i] for i in sorted(items) if part_of[i] == "test")
        split = "not the official split: the folders' own, train and valid train (put setid.mat there for the official one)"
    names = _names(shelf)
    if not train or not test:
        found_so = f"{len(train)} training and {len(test)} test images"
        raise Altered(f"{shelf.folder} has {found_so}; expected train/<class>/image_00001.jpg and test/<class>/…")
    return Listing(tuple(names.get(str(c), f"flower {c}") for c in range(1, CLASSES + 1)), train, test, split, tuple(notes))


def _names(shelf: Shelf) -> dict[str, str]:
    name = shelf.find("cat_to_name.json")
    try:
        found = {} if name is None else json.loads(shelf.text(name))
    except ValueError as error:
        raise Altered(f"{shelf.folder}: {name} is not JSON ({error}); fetch it again") from error
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}
