"""Check copies of object sets: the checksums of their files, their images, and how they differ from what was published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfless.data.checksums import file_digest, require_digest
from selfless.data.errors import Altered, DataError, MissingData
from selfless.data.paths import Place
from selfless.data.sources.base import Check
from selfless.data.sources.objects import find_object_set
from selfless.data.sources.objects.base import ObjectSet
from selfless.data.sources.objects.files import SetFiles, remove_decompressed
from selfless.data.sources.objects.preparing import Prepared, check_prepared, find_prepared, newest_prepared


def verify_objects(name: str, *, data_dir: Place = None) -> Check:
    """Check one object set: checksums of archives, annotations, the presence of every image, and the prepared images."""
    item = find_object_set(name)
    found = [check_copy(item, folder) for folder in item.find(data_dir)]
    usable = [check for check in found if check.usable]
    if usable or found:
        return (usable or found)[0]
    if (prepared := newest_prepared(name, item.choose_options({}))) is not None:
        try:
            check_prepared(prepared)
        except Altered as error:
            return Check(name, "altered", prepared.folder, str(error))
        detail = "prepared images as they were; the files they were made of are gone"
        reduction = describe_reduction(prepared)
        return Check(name, "reduced" if reduction else "ok", prepared.folder, "; ".join(filter(None, (reduction, detail))))
    return Check(name, "absent", None, f"selfless data fetch {name}")


def check_copy(item: ObjectSet, folder: Path, *, prepared_too: bool = True) -> Check:
    """Return the state of the copy in `folder`, and (`prepared_too`) of the images that were prepared from it."""
    files = item.open(folder)
    options, details = item.choose_options({}), []
    try:
        details += require_published(item, files)
        listing = item.list_images(files, options)
        if listing.pictures is None:
            for one in listing.items:
                files.locate(one.name, "the list")
        details.append(f"every image there, {len(listing.train)} + {len(listing.test)}")
        prepared = find_prepared(item.name, files.mark, options)
        if prepared_too and prepared is not None:
            check_prepared(prepared)
            details.append("prepared images as they were")
    except MissingData as error:
        return Check(item.name, "absent", folder, str(error))
    except DataError as error:
        return Check(item.name, "altered", folder, str(error))
    finally:
        remove_decompressed(files)
    reduction = _describe_reduction(item, len(listing.train), len(listing.test), listing.classes, listing.split, options)
    return Check(item.name, "reduced" if reduction else "ok", folder, "; ".join([reduction, *details] if reduction else details))


def require_published(item: ObjectSet, files: SetFiles) -> list[str]:
    """Compare the published files that are here with their checksums; return what was compared. Raise Altered if one differs."""
    compared = []
    for file in item.files:
        path = files.find_on_disk(file.name)
        if path is not None and file.checksum is not None:
            require_digest(file_digest(path, file.checksum[0]), file.checksum[1], str(path))
            compared.append(f"{file.name} as published")
    return compared


def describe_shortfall(item: ObjectSet, train: int, test: int, classes: int, options: Mapping[str, Any]) -> str | None:
    """Say in words which numbers differ from the published ones; None if none does."""
    parts = []
    for found, full, what in ((train, item.train, "training"), (test, item.test, "test"), (train + test, item.total, "")):
        if full is not None and found != full:
            parts.append(" ".join(f"{found} of {full} {what} images".split()))
    full_classes = 70 if options.get("aircraft") == "family" else item.classes
    if classes != full_classes:
        parts.append(f"{classes} of {full_classes} classes")
    return ", ".join(parts) or None


def describe_reduction(prepared: Prepared) -> str:
    """Say in words how a prepared set differs from the published one, in numbers or split; "" if it does not."""
    about = prepared.about
    item = find_object_set(about["set"])
    return _describe_reduction(item, about["train"], about["test"], about["classes"], about["split"], about["options"])


def _describe_reduction(item: ObjectSet, train: int, test: int, classes: Sequence[str], split: str, options: Mapping[str, Any]) -> str:
    shortfall = describe_shortfall(item, train, test, len(classes), options)
    is_usual = split.startswith(("official", "none is published"))
    return "" if is_usual and not shortfall else "; ".join(filter(None, (shortfall, split)))


def notes_of(item: ObjectSet, prepared: Prepared) -> tuple[str, ...]:
    """Return the remarks that every table over a prepared set repeats: it is not the published set, its split is not official."""
    about = prepared.about
    shortfall = describe_shortfall(item, about["train"], about["test"], len(about["classes"]), about["options"])
    notes = [f"{item.name} is not the published set: {shortfall}"] if shortfall else []
    if not about["split"].startswith("official"):
        notes.append(f"{item.name}: split: {about['split']}")
    return tuple(notes)
