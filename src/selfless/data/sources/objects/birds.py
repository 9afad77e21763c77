"""Caltech-UCSD Birds-200-2011: images.txt, image_class_labels.txt, train_test_split.txt, classes.txt, bounding_boxes.txt and images/.

Official split: 5,994 training and 5,794 test images. The paper cites the set of 2010 (Welinder et al.), which has fewer images of the
same species; the set of 2011 is the usual one. Images are whole by default; `boxes=True` crops each to its bird (x, y, width, height).
"""

from __future__ import annotations

from typing import Any

from selfless.data.errors import Altered
from selfless.data.sources.objects.base import ObjectSet, published_file
from selfless.data.sources.objects.files import SetFiles
from selfless.data.sources.objects.listing import Box, Item, Listing, parse_number, read_table


def read(files: SetFiles, options: dict[str, Any]) -> Listing:
    """List the images of a copy, in the layout above."""
    top = files.find_top("image_class_labels.txt")
    paths = dict(_read_rows(files, f"{top}images.txt"))
    names = [name.split(".", 1)[-1].replace("_", " ") for _, name in _read_rows(files, f"{top}classes.txt")]
    used = [f"{top}{name}" for name in ("images.txt", "classes.txt", "image_class_labels.txt", "train_test_split.txt")]
    labels = {i: parse_number(text, f"{files.folder}: {used[2]}, image {i}", 1, len(names)) - 1 for i, text in _read_rows(files, used[2])}
    training = {i: parse_number(text, f"{files.folder}: {used[3]}, image {i}", 0, 1) for i, text in _read_rows(files, used[3])}
    boxes: dict[str, Box] = {}
    if options["boxes"]:
        used.append(f"{top}bounding_boxes.txt")
        for i, *numbers in _read_rows(files, used[-1], 5):
            try:
                x, y, w, h = (float(n) for n in numbers)
            except ValueError:
                raise Altered(f"{files.folder}: {used[-1]}: the box of image {i} is {' '.join(numbers)}; fetch it again") from None
            boxes[i] = (x, y, x + w, y + h)
    known = [set(labels), set(training), set(boxes)]
    for name, images in zip(used[2:], known, strict=False):  # known[2], the boxes, only if they are read
        if missing := set(paths) - images:
            raise Altered(f"{files.folder}: {name} says nothing about image {min(missing)} of images.txt; fetch it again")
    every = {i: Item(f"{top}images/{path}", labels[i], boxes.get(i)) for i, path in paths.items()}
    train, test = (tuple(item for i, item in every.items() if training[i] == half) for half in (1, 0))
    return Listing(tuple(names), train, test, "official: train_test_split.txt", tuple(used))


def _read_rows(files: SetFiles, name: str, columns: int = 2) -> list[list[str]]:
    """Return the rows of a table. Raise Altered if two rows have the same number, which is the first column."""
    files.require(name)
    found, seen = read_table(files, name, columns), set[str]()
    for i, *_ in found:
        if i in seen:
            raise Altered(f"{files.folder}: {name} has number {i} twice; fetch it again")
        seen.add(i)
    return found


BIRDS = ObjectSet(
    "birds",
    "Caltech-UCSD Birds 2011",
    read,
    (
        published_file(
            "CUB_200_2011.tgz",
            1150,
            "97eceeb196236b17998738112f37df78",
            "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
        ),
    ),
    200,
    5994,
    5794,
    options=("boxes",),
)
