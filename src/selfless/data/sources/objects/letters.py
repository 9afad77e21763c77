"""Chars74K: English characters in natural images, English/Img/GoodImg/Bmp/Sample001/img001-00001.png …, 62 classes (0-9, A-Z, a-z).

The 7,705 good images. There is no official split of all of them, so a fixed fifth of every class is used for testing. The bad images of
the set, its handwriting (EnglishHnd) and its 62,992 images of computer fonts (EnglishFnt) are not used.

Also read: the 6,283 images of 20×20 pixels of a Kaggle contest, trainResized/1.Bmp … with trainLabels.csv (ID,Class), as in the public
repository naveensr89/chars74k_nsr; they are split in the same way.
"""

from __future__ import annotations

import re
import string
from typing import Any

from selfless.data.errors import Altered
from selfless.data.sources.objects.base import ObjectSet, published_file
from selfless.data.sources.objects.files import SetFiles
from selfless.data.sources.objects.listing import Item, Listing, split_items

CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
GOOD = re.compile(r"(?:^|/)GoodImg/Bmp/Sample(\d{3})/img(\d{3})-\d+\.png$")
SPLIT = "none is published: a fixed fifth of every class tests"


def read(files: SetFiles, options: dict[str, Any]) -> Listing:
    """List the images of a copy, in any of the layouts above."""
    if files.find("trainLabels.csv") is not None:
        return _read_contest(files)
    items = []
    for name in files.names():
        if match := GOOD.search(name):
            if match[1] != match[2] or not 1 <= int(match[1]) <= len(CLASSES):
                raise Altered(f"{files.folder}: {name} is of class {match[1]}, which is out of range: 001 to 062; fetch it again")
            items.append(Item(name, int(match[1]) - 1))
    if not items:
        files.require("English/Img/GoodImg/Bmp/Sample001/img001-00001.png")
    train, test = split_items(items, "letters")
    return Listing(CLASSES, train, test, SPLIT, ())


def _read_contest(files: SetFiles) -> Listing:
    """Read the images of the Kaggle contest."""
    labels, items = files.require("trainLabels.csv"), []
    lines = files.read_text(labels).split()
    if lines[:1] != ["ID,Class"] or len(lines) < 2:
        raise Altered(f"{files.folder}: {labels} should start with ID,Class; fetch it again")
    top = files.find_top(f"trainResized/{lines[1].split(',')[0]}.Bmp")
    for at, line in enumerate(lines[1:], 2):
        image, _, letter = line.partition(",")
        if letter not in CLASSES or not image.isdigit():
            raise Altered(f"{files.folder}: {labels}, line {at}: {line!r} should be a number and one of 62 characters; fetch it again")
        items.append(Item(f"{top}trainResized/{image}.Bmp", CLASSES.index(letter)))
    train, test = split_items(items, "letters")
    return Listing(CLASSES, train, test, f"{SPLIT} (20×20 images of a Kaggle contest)", (labels,))


LETTERS = ObjectSet(
    "letters",
    "Chars74K, good images",
    read,
    (
        published_file(
            "EnglishImg.tgz",
            128,
            "85d157e0c58f998e1cda8def62bcda0d",
            "http://www.ee.surrey.ac.uk/CVSSP/demos/chars74k/EnglishImg.tgz",
        ),
    ),
    62,
    total=7705,
)
