"""FGVC Aircraft 2013b: data/images/*.jpg, images_variant_trainval.txt and images_variant_test.txt, variants.txt, images_box.txt.

Official split: trainval (6,667 images) and test (3,333), of 100 variants; `aircraft="family"` takes the 70 families instead. Whole images
less the 20 rows at the bottom, which hold a line of copyright, as the set's authors ask; `boxes=True` crops each to its aircraft
(x1 y1 x2 y2, counted from 1, both ends included; the boxes leave the line out).
"""

from __future__ import annotations

from typing import Any

from selfless.data.checksums import Altered
from selfless.data.sources.objects.files import Shelf
from selfless.data.sources.objects.listing import Box, Item, Listing, number, rows

BANNER = 20
NAMES = {"variant": "variants.txt", "family": "families.txt"}


def read(shelf: Shelf, options: dict[str, Any]) -> Listing:
    level = options["aircraft"]
    lists = [f"images_{level}_{half}.txt" for half in ("trainval", "test")]
    top = shelf.top(lists[0])
    used = [f"{top}{name}" for name in (NAMES[level], *lists)]
    for name in used:
        shelf.need(name)
    classes = [line.strip() for line in shelf.text(used[0]).splitlines() if line.strip()]
    numbers = {name: i for i, name in enumerate(classes)}
    boxes: dict[str, Box] = {}
    if options["boxes"]:
        used.append(f"{top}images_box.txt")
        shelf.need(used[-1])
        for image, *corners in rows(shelf, used[-1], 5):
            x1, y1, x2, y2 = (number(c, f"{shelf.folder}: {used[-1]}, image {image}", 0, 100_000) for c in corners)
            boxes[image] = (x1 - 1, y1 - 1, x2, y2)

    def half(name: str) -> tuple[Item, ...]:
        items = []
        for image, title in rows(shelf, name, 2):
            if title not in numbers:
                raise Altered(f"{shelf.folder}: {name}: {title!r} of image {image} is not in {NAMES[level]}; fetch it again")
            if options["boxes"] and image not in boxes:
                raise Altered(f"{shelf.folder}: {used[-1]} says nothing about image {image}; fetch it again")
            items.append(Item(f"{top}images/{image}.jpg", numbers[title], boxes.get(image), 0 if options["boxes"] else BANNER))
        return tuple(items)

    return Listing(tuple(classes), half(used[1]), half(used[2]), f"official: trainval and test, by {level}", tuple(used))
