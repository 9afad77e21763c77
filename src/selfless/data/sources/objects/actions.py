"""VOC 2012 Actions: ImageSets/Action/train.txt and val.txt, one image per line, Annotations/<image>.xml, JPEGImages/<image>.jpg.

An example is a person, always cropped to that person's box, because the actions belong to persons and not to images (bndbox counts from
1, both ends included). Persons with exactly one of the ten actions are used; those with several, or with none ("other"), are left out.
Official split: train for training and val for testing, 4,588 images together; the test annotations of the challenge were never published.
The number of persons with exactly one action is not published, so the number of listed images shows whether the set is complete.

Also read: lists of `image object`, which use only that object of the image.
"""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from selfless.data.errors import Altered
from selfless.data.sources.objects.base import ObjectSet, published_file
from selfless.data.sources.objects.files import SetFiles
from selfless.data.sources.objects.listing import Item, Listing, parse_number, read_table

NAMES = tuple("jumping phoning playinginstrument reading ridingbike ridinghorse running takingphoto usingcomputer walking".split())
IMAGES = 4588  # in the official lists
CORNERS = ("xmin", "ymin", "xmax", "ymax")


def read(files: SetFiles, options: dict[str, Any]) -> Listing:
    """List the images of a copy, in any of the layouts above."""
    top = files.find_top("ImageSets/Action/train.txt")
    lists = [f"{top}ImageSets/Action/{half}.txt" for half in ("train", "val")]
    files.require(lists[1])
    (train, train_images), (test, test_images) = (_read_half(files, top, name) for name in lists)
    images = train_images + test_images
    which = "official" if images == IMAGES else f"{images} of the {IMAGES} images of the official lists"
    split = f"{which}: train trains, val tests (test is not public); persons with exactly one action, cropped"
    return Listing(NAMES, train, test, split, tuple(lists))


def _read_half(files: SetFiles, top: str, name: str) -> tuple[tuple[Item, ...], int]:
    """Return the persons of one list, and how many images the list names."""
    items, people = [], dict[str, list[ElementTree.Element]]()
    for at, (line,) in enumerate(read_table(files, name, 1), 1):
        image, *index = line.split()
        if len(index) > 1:
            raise Altered(f"{files.folder}: {name}, entry {at}: {len(index) + 1} columns instead of 1 or 2; fetch it again")
        if image not in people:
            people[image] = _read_objects(files, f"{top}Annotations/{image}.xml", name)
        where = f"{files.folder}: {name}: object of image {image}"
        one = [people[image][parse_number(i, where, 1, len(people[image])) - 1] for i in index]
        items += [
            _make_item(files, top, image, doing[0], person) for person in one or people[image] if len(doing := _actions_of(person)) == 1
        ]
    if not items:
        raise Altered(f"{files.folder}: {name} lists no person with exactly one action; fetch it again")
    return tuple(items), len(people)


def _actions_of(person: ElementTree.Element) -> list[str]:
    """Return the actions that a person does."""
    return [a for a in NAMES if (person.findtext(f"actions/{a}") or "0").strip() == "1"]


def _make_item(files: SetFiles, top: str, image: str, action: str, person: ElementTree.Element) -> Item:
    where = f"{files.folder}: Annotations/{image}.xml"
    corners = [person.findtext(f"bndbox/{corner}") for corner in CORNERS]
    if None in corners:
        raise Altered(f"{where}: a person has no whole bndbox; fetch it again")
    x1, y1, x2, y2 = (parse_number(str(c).strip(), f"{where}, bndbox", 0, 100_000) for c in corners)
    return Item(f"{top}JPEGImages/{image}.jpg", NAMES.index(action), (x1 - 1, y1 - 1, x2, y2))


def _read_objects(files: SetFiles, name: str, listed_in: str) -> list[ElementTree.Element]:
    files.locate(name, listed_in)
    text = files.read_text(name)
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise Altered(f"{files.folder}: {name} declares entities, which no annotation of VOC does: refused")
    try:
        return ElementTree.fromstring(text).findall("object")
    except ElementTree.ParseError as error:
        raise Altered(f"{files.folder}: {name} is not whole XML ({error}); fetch it again") from error


ACTIONS = ObjectSet(
    "actions",
    "PASCAL VOC 2012 Actions",
    read,
    (
        published_file(
            "VOCtrainval_11-May-2012.tar",
            2000,
            "6cd6e144f989b92b3379bac3b3de84fd",
            "http://host.robots.ox.ac.uk/pascal/VOC/voc2012/VOCtrainval_11-May-2012.tar",
        ),
    ),
    10,
)
