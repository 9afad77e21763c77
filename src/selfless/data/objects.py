"""Where the object sets are, fetching and checking them, and their prepared form.

A set's files belong into `objects/<name>/` below the data folder, as they were published, packed or unpacked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfless.data.checksums import Altered, digest, expect
from selfless.data.fetch import from_mirrors, is_whole
from selfless.data.paths import DataError, MissingData, data_dir, roots, writable_root
from selfless.data.sources.objects.base import OBJECTS, ObjectSet, object_set
from selfless.data.sources.objects.files import Shelf, forget_unpacked
from selfless.data.sources.objects.listing import Listing
from selfless.data.sources.objects.preparing import Prepared, home, kept, key, opened, prepare, recheck
from selfless.data.verify import Check

DEFAULTS: dict[str, Any] = {"boxes": False, "aircraft": "variant"}
Place = str | os.PathLike[str] | None


def folders(name: str, where: Place = None) -> tuple[Path, ...]:
    """The folders of that name, below the data folder and the cache, that hold any file."""
    places = [root / "objects" / name for root in roots(where)]
    return tuple(p for p in places if p.is_dir() and any(f.is_file() and not f.name.startswith(".") for f in p.rglob("*")))


def chosen(item: ObjectSet, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that matter to this set, checked, with their defaults."""
    if not isinstance(options.get("boxes", False), bool):
        raise ValueError(f"boxes is {options['boxes']!r}; it must be true (crop to the bounding boxes) or false (whole images)")
    if options.get("aircraft", "variant") not in ("variant", "family"):
        raise ValueError(f"aircraft is {options['aircraft']!r}; choose variant (100 classes) or family (70)")
    return {name: options.get(name, DEFAULTS[name]) for name in item.options}


def load(name: str, *, data_dir: Place = None, workers: int | None = None, **options: Any) -> Prepared:
    """One object set, prepared first if it is not yet. MissingData says what to put where."""
    item = object_set(name)
    picked, fault = chosen(item, options), None
    for folder in folders(name, data_dir):
        shelf = Shelf(folder, item.archives)
        if (ready := opened(home() / f"{name}-{key(name, shelf.mark, picked)}")) is not None:
            return ready
        try:
            as_published(item, shelf)
            return prepare(name, shelf, listed(item, shelf, picked), picked, workers)
        except (Altered, MissingData) as error:
            fault = fault or error
    if fault is not None:
        raise fault
    if (ready := kept(name, picked)) is not None:
        return ready
    raise MissingData(by_hand(item, ["its files are in no data folder"], data_dir))


def ready(name: str, *, data_dir: Place = None, **options: Any) -> Prepared | None:
    """What `load` gives if nothing has to be prepared for it; None otherwise."""
    item = object_set(name)
    picked, places = chosen(item, options), folders(name, data_dir)
    for folder in places:
        if (there := opened(home() / f"{name}-{key(name, Shelf(folder, item.archives).mark, picked)}")) is not None:
            return there
    return None if places else kept(name, picked)


def as_published(item: ObjectSet, shelf: Shelf) -> list[str]:
    """Compares the published files that are here with their checksums; `Altered` if one is another."""
    said = []
    for file in item.files:
        path = shelf.loose(file.name)
        if path is not None and file.checksum is not None:
            expect(digest(path, file.checksum[0]), file.checksum[1], str(path))
            said.append(f"{file.name} as published")
    return said


def listed(item: ObjectSet, shelf: Shelf, options: dict[str, Any]) -> Listing:
    """What the reader finds; a set without images or classes is an error, and so is one that tests on images it trains on."""
    listing = item.read(shelf, options)
    if not listing.train or not listing.test:
        raise Altered(f"{shelf.folder} lists {len(listing.train)} training and {len(listing.test)} test images; fetch it again")
    if both := {one.name for one in listing.train} & {one.name for one in listing.test}:
        count = f"{len(both)} image{'s' * (len(both) > 1)}"
        raise Altered(f"{shelf.folder}: its lists have {count} for training and for testing, {min(both)} first; fetch them again")
    return listing


def shortfall(item: ObjectSet, train: int, test: int, classes: int, options: Mapping[str, Any]) -> str | None:
    """How a set falls short of the published one (or exceeds it), in words."""
    parts = []
    for found, full, what in ((train, item.train, "training"), (test, item.test, "test"), (train + test, item.total, "")):
        if full is not None and found != full:
            parts.append(" ".join(f"{found} of {full} {what} images".split()))
    full_classes = 70 if options.get("aircraft") == "family" else item.classes
    if classes != full_classes:
        parts.append(f"{classes} of {full_classes} classes")
    return ", ".join(parts) or None


def reduction(item: ObjectSet, train: int, test: int, classes: Sequence[str], split: str, options: Mapping[str, Any]) -> str:
    """In what a set is not the published one, counts and split; empty where it is."""
    short = shortfall(item, train, test, len(classes), options)
    usual = split.startswith(("official", "none is published"))
    return "" if usual and not short else "; ".join(filter(None, (short, split)))


def reduced(prepared: Prepared) -> str:
    """`reduction` of a prepared set."""
    about = prepared.about
    return reduction(object_set(about["set"]), about["train"], about["test"], about["classes"], about["split"], about["options"])


def notes(item: ObjectSet, prepared: Prepared) -> tuple[str, ...]:
    """What every table must say of a prepared set: that it is not the published one, that its split is not official."""
    about = prepared.about
    short = shortfall(item, about["train"], about["test"], len(about["classes"]), about["options"])
    found = [f"{item.name} is not the published set: {short}"] if short else []
    if not about["split"].startswith("official"):
        found.append(f"{item.name}: split: {about['split']}")
    return tuple(found)


def fetch(name: str, *, data_dir: Place = None) -> Path:
    """Downloads what is publicly downloadable of a set; MissingData names each file that then still is not there, and where to put it.

    A set that can be read as it is (unpacked, or in another layout) is left alone.
    """
    item = object_set(name)
    for folder in folders(name, data_dir):
        if (check := _check(item, folder, prepared_too=False)).usable:
            return folder
        if check.status == "altered" and not any((folder / file.name).is_file() for file in item.files):
            raise Altered(check.detail)
    folder = writable_root(data_dir) / "objects" / name
    troubles = from_mirrors([file for file in item.files if file.urls], folder)
    lacking = [file.name for file in item.files if not file.urls and not is_whole(file, folder / file.name)]
    if lacking:
        troubles.append(f"{', '.join(lacking)}: not publicly downloadable; {item.hint}")
    if troubles:
        raise MissingData(by_hand(item, troubles, data_dir))
    after = _check(item, folder, prepared_too=False)
    if not after.usable:
        raise DataError(f"{name} was fetched, but cannot be read: {after.detail}")
    return folder


def by_hand(item: ObjectSet, troubles: list[str], where: Place = None) -> str:
    """What to do by hand, exactly: each file that is not there, its address, its checksum, and the folder it belongs in."""
    folder = (data_dir(where) / "objects" / item.name).absolute()
    lines = [f"{item.name} ({item.title}) is not here:", *(f"  {line}" for line in troubles)]
    lines.append(f"Put these files, or what is in them, into {folder}:")
    for file in item.files:
        if not (folder / file.name).is_file():
            lines.append(f"  {file.name}   from {file.urls[0] if file.urls else item.hint}   md5 {file.md5 or 'not published'}")
    return "\n".join([*lines, "or point SELFLESS_DATA (or --data-dir) at a folder whose objects/ has them."])


def verify(name: str, *, data_dir: Place = None) -> Check:
    """Compares archives with their published checksums, reads the annotations, looks for every image, and reads prepared images again."""
    item = object_set(name)
    found = [_check(item, folder) for folder in folders(name, data_dir)]
    usable = [check for check in found if check.usable]
    if usable or found:
        return (usable or found)[0]
    if (ready := kept(name, chosen(item, {}))) is not None:
        try:
            recheck(ready)
        except Altered as error:
            return Check(name, "altered", ready.folder, str(error))
        said = "prepared images as they were; the files they were made of are gone"
        less = reduced(ready)
        return Check(name, "reduced" if less else "ok", ready.folder, "; ".join(filter(None, (less, said))))
    return Check(name, "absent", None, f"selfless data fetch {name}")


def present(where: Place = None) -> tuple[str, ...]:
    """The sets that are here, as files or prepared, in the paper's order. By name only: no content is read."""
    return tuple(name for name, item in OBJECTS.items() if folders(name, where) or kept(name, chosen(item, {})) is not None)


def _check(item: ObjectSet, folder: Path, *, prepared_too: bool = True) -> Check:
    shelf = Shelf(folder, item.archives)
    options, details = chosen(item, {}), []
    try:
        details += as_published(item, shelf)
        listing = listed(item, shelf, options)
        if listing.pictures is None:
            for one in listing.items:
                shelf.slice(one.name, "the list")
        details.append(f"every image there, {len(listing.train)} + {len(listing.test)}")
        ready = opened(home() / f"{item.name}-{key(item.name, shelf.mark, options)}")
        if prepared_too and ready is not None:
            recheck(ready)
            details.append("prepared images as they were")
    except MissingData as error:
        return Check(item.name, "absent", folder, str(error))
    except DataError as error:
        return Check(item.name, "altered", folder, str(error))
    finally:
        forget_unpacked(shelf)
    less = reduction(item, len(listing.train), len(listing.test), listing.classes, listing.split, options)
    return Check(item.name, "reduced" if less else "ok", folder, "; ".join([less, *details] if less else details))
