"""VOC 2012 Actions: ImageSets/Action/train.txt and val.txt, an image a line, Annotations/<image>.xml, JPEGImages/<image>.jpg.

An example is a person, always cropped to that person's box, since the actions are a person's and not an image's (bndbox counts from 1,
both ends included). Persons with exactly one of the ten actions are taken; those with several, or with none ("other"), are left out.
Official split: train trains and val tests, 4,588 images together. The challenge's own test annotations were never published. How many
persons do exactly one thing is published nowhere: it is by the images that the lists name that a part is told from the whole.

Also read: lists of `image object`, which take that object of the image alone.
"""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from selfless.data.checksums import Altered
from selfless.data.sources.objects.files import Shelf
from selfless.data.sources.objects.listing import Item, Listing, number, rows

ACTIONS = tuple("jumping phoning playinginstrument reading ridingbike ridinghorse running takingphoto usingcomputer walking".split())
IMAGES = 4588
CORNERS = ("xmin", "ymin", "xmax", "ymax")


def read(shelf: Shelf, options: dict[str, Any]) -> Listing:
    top = shelf.top("ImageSets/Action/train.txt")
    lists = [f"{top}ImageSets/Action/{half}.txt" for half in ("train", "val")]
    shelf.need(lists[1])
    (train, trained), (test, tested) = (_half(shelf, top, name) for name in lists)
    images = trained + tested
    which = "official" if images == IMAGES else f"{images} of the {IMAGES} images of the official lists"
    split = f"{which}: train trains, val tests (test is not public); persons with exactly one action, cropped"
    return Listing(ACTIONS, train, test, split, tuple(lists))


def _half(shelf: Shelf, top: str, name: str) -> tuple[tuple[Item, ...], int]:
    """The persons of one list, and how many images it names."""
    items, people = [], dict[str, list[ElementTree.Element]]()
    for at, (line,) in enumerate(rows(shelf, name, 1), 1):
        image, *index = line.split()
        if len(index) > 1:
            raise Altered(f"{shelf.folder}: {name}, entry {at}: {len(index) + 1} columns instead of 1 or 2; fetch it again")
        if image not in people:
            people[image] = _objects(shelf, f"{top}Annotations/{image}.xml", name)
        where = f"{shelf.folder}: {name}: object of image {image}"
        one = [people[image][number(i, where, 1, len(people[image])) - 1] for i in index]
        items += [_item(shelf, top, image, doing[0], person) for person in one or people[image] if len(doing := _doing(person)) == 1]
    if not items:
        raise Altered(f"{shelf.folder}: {name} lists nobody with exactly one action; fetch it again")
    return tuple(items), len(people)


def _doing(person: ElementTree.Element) -> list[str]:
    return [a for a in ACTIONS if (person.findtext(f"actions/{a}") or "0").strip() == "1"]


def _item(shelf: Shelf, top: str, image: str, action: str, person: ElementTree.Element) -> Item:
    where = f"{shelf.folder}: Annotations/{image}.xml"
    corners = [person.findtext(f"bndbox/{corner}") for corner in CORNERS]
    if None in corners:
        raise Altered(f"{where}: a person has no whole bndbox; fetch it again")
    x1, y1, x2, y2 = (number(str(c).strip(), f"{where}, bndbox", 0, 100_000) for c in corners)
    return Item(f"{top}JPEGImages/{image}.jpg", ACTIONS.index(action), (x1 - 1, y1 - 1, x2, y2))


def _objects(shelf: Shelf, name: str, listed_in: str) -> list[ElementTree.Element]:
    shelf.slice(name, listed_in)
    text = shelf.text(name)
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise Altered(f"{shelf.folder}: {name} declares entities, which no annotation of VOC does: refused")
    try:
        return ElementTree.fromstring(text).findall("object")
    except ElementTree.ParseError as error:
        raise Altered(f"{shelf.folder}: {name} is not whole XML ({error}); fetch it again") from error
