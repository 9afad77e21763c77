"""Chars74K: English characters in natural images, English/Img/GoodImg/Bmp/Sample001/img001-00001.png …, 62 classes (0-9, A-Z, a-z).

The 7,705 good images. There is no official split of all of them: a fixed fifth of every class tests, always the same. The set's bad images,
its handwriting (EnglishHnd) and its 62,992 computer fonts (EnglishFnt) are not used.

Also read: the 6,283 images of 20×20 pixels of a Kaggle contest, trainResized/1.Bmp … with trainLabels.csv (ID,Class), as in the public
repository naveensr89/chars74k_nsr; split in the same way.
"""

from __future__ import annotations

import re
import string
from typing import Any

from selfless.data.checksums import Altered
from selfless.data.sources.objects.files import Shelf
from selfless.data.sources.objects.listing import Item, Listing, halves

CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
GOOD = re.compile(r"(?:^|/)GoodImg/Bmp/Sample(\d{3})/img(\d{3})-\d+\.png$")
SPLIT = "none is published: a fixed fifth of every class tests"


def read(shelf: Shelf, options: dict[str, Any]) -> Listing:
    if shelf.find("trainLabels.csv") is not None:
        return _contest(shelf)
    items = []
    for name in shelf.names():
        if match := GOOD.search(name):
            if match[1] != match[2] or not 1 <= int(match[1]) <= len(CLASSES):
                raise Altered(f"{shelf.folder}: {name} is of class {match[1]}, which is out of range: 001 to 062; fetch it again")
            items.append(Item(name, int(match[1]) - 1))
    if not items:
        shelf.need("English/Img/GoodImg/Bmp/Sample001/img001-00001.png")
    train, test = halves(items, "letters")
    return Listing(CLASSES, train, test, SPLIT, ())


def _contest(shelf: Shelf) -> Listing:
    labels, items = shelf.need("trainLabels.csv"), []
    lines = shelf.text(labels).split()
    if lines[:1] != ["ID,Class"] or len(lines) < 2:
        raise Altered(f"{shelf.folder}: {labels} should start with ID,Class; fetch it again")
    top = shelf.top(f"trainResized/{lines[1].split(',')[0]}.Bmp")
    for at, line in enumerate(lines[1:], 2):
        image, _, letter = line.partition(",")
        if letter not in CLASSES or not image.isdigit():
            raise Altered(f"{shelf.folder}: {labels}, line {at}: {line!r} is no number and one of 62 characters; fetch it again")
        items.append(Item(f"{top}trainResized/{image}.Bmp", CLASSES.index(letter)))
    train, test = halves(items, "letters")
    return Listing(CLASSES, train, test, f"{SPLIT} (20×20 images of a Kaggle contest)", (labels,))
