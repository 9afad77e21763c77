"""MIT Indoor Scenes: Images/<category>/*.jpg, and two lists of `category/file`, TrainImages.txt and TestImages.txt.

Official split: 80 training and 20 test images of each of 67 categories (the archive holds 15,620 images; the others are in no list).
"""

from __future__ import annotations

from typing import Any

from selfless.data.checksums import Altered
from selfless.data.sources.objects.files import Shelf
from selfless.data.sources.objects.listing import Item, Listing


def read(shelf: Shelf, options: dict[str, Any]) -> Listing:
    lists = [shelf.need(name) for name in ("TrainImages.txt", "TestImages.txt")]
    lines = [[line.strip() for line in shelf.text(name).splitlines() if line.strip()] for name in lists]
    for name, files in zip(lists, lines, strict=True):
        if not files or any(file.count("/") != 1 or ".." in file for file in files):
            wrong = next((file for file in files if file.count("/") != 1 or ".." in file), "nothing")
            raise Altered(f"{shelf.folder}: {name} should list category/file and lists {wrong}; fetch it again")
    classes = sorted({file.split("/")[0] for files in lines for file in files})
    number = {c: i for i, c in enumerate(classes)}
    top = shelf.top(lines[0][0])
    train, test = (tuple(Item(top + file, number[file.split("/")[0]]) for file in files) for files in lines)
    return Listing(tuple(classes), train, test, "official: TrainImages.txt and TestImages.txt", tuple(lists))
