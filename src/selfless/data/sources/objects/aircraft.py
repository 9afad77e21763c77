"""FGVC Aircraft 2013b: data/images/*.jpg, images_variant_trainval.txt and images_variant_test.txt, variants.txt, images_box.txt.

Official split: trainval (6,667 images) and test (3,333), of 100 variants; `aircraft="family"` takes the 70 families instead. Images are
whole except for the 20 lowest rows, which are cut off as the authors of the set ask. `boxes=True` crops each image to its aircraft:
x1 y1 x2 y2, counted from 1, both ends included; the boxes leave the lowest rows out.
"""

from __future__ import annotations

from typing import Any

from selfless.data.errors import Altered
from selfless.data.sources.objects.base import ObjectSet, published_file
from selfless.data.sources.objects.files import SetFiles
from selfless.data.sources.objects.listing import Box, Item, Listing, parse_number, read_table

BANNER = 20  # rows at the bottom, which contain a copyright line
NAMES = {"variant": "variants.txt", "family": "families.txt"}


def read(files: SetFiles, options: dict[str, Any]) -> Listing:
    """List the images of a copy, in the layout above."""
    level = options["aircraft"]
    lists = [f"images_{level}_{half}.txt" for half in ("trainval", "test")]
    top = files.find_top(lists[0])
    used = [f"{top}{name}" for name in (NAMES[level], *lists)]
    for name in used:
        files.require(name)
    classes = [line.strip() for line in files.read_text(used[0]).splitlines() if line.strip()]
    numbers = {name: i for i, name in enumerate(classes)}
    boxes: dict[str, Box] = {}
    if options["boxes"]:
        used.append(f"{top}images_box.txt")
        files.require(used[-1])
        for image, *corners in read_table(files, used[-1], 5):
            x1, y1, x2, y2 = (parse_number(c, f"{files.folder}: {used[-1]}, image {image}", 0, 100_000) for c in corners)
            boxes[image] = (x1 - 1, y1 - 1, x2, y2)

    def read_half(name: str) -> tuple[Item, ...]:
        items = []
        for image, title in read_table(files, name, 2):
            if title not in numbers:
                raise Altered(f"{files.folder}: {name}: {title!r} of image {image} is not in {NAMES[level]}; fetch it again")
            if options["boxes"] and image not in boxes:
                raise Altered(f"{files.folder}: {used[-1]} says nothing about image {image}; fetch it again")
            items.append(Item(f"{top}images/{image}.jpg", numbers[title], boxes.get(image), 0 if options["boxes"] else BANNER))
        return tuple(items)

    return Listing(tuple(classes), read_half(used[1]), read_half(used[2]), f"official: trainval and test, by {level}", tuple(used))


AIRCRAFT = ObjectSet(
    "aircraft",
    "FGVC Aircraft 2013b",
    read,
    (
        published_file(
            "fgvc-aircraft-2013b.tar.gz",
            2750,
            "d4acdd33327262359767eeaa97a4f732",
            "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz",
        ),
    ),
    100,
    6667,
    3333,
    options=("boxes", "aircraft"),
)
