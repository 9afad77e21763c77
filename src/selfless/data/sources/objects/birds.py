"""Caltech-UCSD Birds-200-2011: images.txt, image_class_labels.txt, train_test_split.txt, classes.txt, bounding_boxes.txt and images/.

Official split: 5,994 training and 5,794 test images. The paper cites the birds of 2010 (Welinder et al.), fewer images of the same
species; these of 2011 are what everybody uses. Whole images by default; `boxes=True` crops each to its bird (x, y, width, height).
"""

from __future__ import annotations

from typing import Any

from selfless.data.checksums import Altered
from selfless.data.sources.objects.files import Shelf
from selfless.data.sources.objects.listing import Box, Item, Listing, number, rows


def read(shelf: Shelf, options: dict[str, Any]) -> Listing:
    top = shelf.top("image_class_labels.txt")
    files = dict(_table(shelf, f"{top}images.txt"))
    names = [name.split(".", 1)[-1].replace("_", " ") for _, name in _table(shelf, f"{top}classes.txt")]
    used = [f"{top}{name}" for name in ("images.txt", "classes.txt", "image_class_labels.txt", "train_test_split.txt")]
    labels = {i: number(text, f"{shelf.folder}: {used[2]}, image {i}", 1, len(names)) - 1 for i, text in _table(shelf, used[2])}
    training = {i: number(text, f"{shelf.folder}: {used[3]}, image {i}", 0, 1) for i, text in _table(shelf, used[3])}
    boxes: dict[str, Box] = {}
    if options["boxes"]:
        used.append(f"{top}bounding_boxes.txt")
        for i, *numbers in _table(shelf, used[-1], 5):
            try:
                x, y, w, h = (float(n) for n in numbers)
            except ValueError:
                raise Altered(f"{shelf.folder}: {used[-1]}: the box of image {i} is {' '.join(numbers)}; fetch it again") from None
            boxes[i] = (x, y, x + w, y + h)
    known = [set(labels), set(training), set(boxes)]
    for name, images in zip(used[2:], known, strict=False):  # the third only with boxes
        if missing := set(files) - images:
            raise Altered(f"{shelf.folder}: {name} says nothing about image {min(missing)} of images.txt; fetch it again")
    every = {i: Item(f"{top}images/{file}", labels[i], boxes.get(i)) for i, file in files.items()}
    train, test = (tuple(item for i, item in every.items() if training[i] == half) for half in (1, 0))
    return Listing(tuple(names), train, test, "official: train_test_split.txt", tuple(used))


def _table(shelf: Shelf, name: str, columns: int = 2) -> list[list[str]]:
    """The rows of a table whose first column is a number of its own."""
    shelf.need(name)
    found, seen = rows(shelf, name, columns), set[str]()
    for i, *_ in found:
        if i in seen:
            raise Altered(f"{shelf.folder}: {name} has number {i} twice; fetch it again")
        seen.add(i)
    return found
