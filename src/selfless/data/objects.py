"""Object sets by name: find, prepare and fetch them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from selfless.data import paths
from selfless.data.errors import Altered, DataError, MissingData
from selfless.data.fetch import fetch_from_mirrors, is_published
from selfless.data.paths import Place, writable_dir
from selfless.data.sources.objects import OBJECTS, find_object_set
from selfless.data.sources.objects.base import FOLDER, ObjectSet
from selfless.data.sources.objects.checks import check_copy, require_published
from selfless.data.sources.objects.preparing import Prepared, find_prepared, newest_prepared, prepare


def present_objects(data_dir: Place = None) -> tuple[str, ...]:
    """Return the names of the sets that are on this machine, as files or prepared, in the paper's order. No content is read."""
    return tuple(
        name for name, item in OBJECTS.items() if item.find(data_dir) or newest_prepared(name, item.choose_options({})) is not None
    )


def prepare_objects(name: str, *, data_dir: Place = None, workers: int | None = None, **options: Any) -> Prepared:
    """Return one object set with its images at 224×224, and prepare it if that has not been done. MissingData names the missing files."""
    item = find_object_set(name)
    chosen, first = item.choose_options(options), None
    for folder in item.find(data_dir):
        files = item.open(folder)
        if (prepared := find_prepared(name, files.mark, chosen)) is not None:
            return prepared
        try:
            require_published(item, files)
            return prepare(name, files, item.list_images(files, chosen), chosen, workers)
        except (Altered, MissingData) as error:
            first = first or error
    if first is not None:
        raise first
    if (prepared := newest_prepared(name, chosen)) is not None:
        return prepared
    raise MissingData(explain_missing_set(item, ["its files are in no data folder"], data_dir))


def prepared_objects(name: str, *, data_dir: Place = None, **options: Any) -> Prepared | None:
    """Return what `prepare_objects` returns if nothing has to be prepared; else None."""
    item = find_object_set(name)
    chosen, folders = item.choose_options(options), item.find(data_dir)
    for folder in folders:
        if (prepared := find_prepared(name, item.open(folder).mark, chosen)) is not None:
            return prepared
    return None if folders else newest_prepared(name, chosen)


def fetch_objects(name: str, *, data_dir: Place = None) -> Path:
    """Download the files of a set that are publicly available. MissingData names each file that is still missing, and its folder.

    A copy that can be read (unpacked, or in another layout) is left unchanged.
    """
    item = find_object_set(name)
    for folder in item.find(data_dir):
        if (check := check_copy(item, folder, prepared_too=False)).usable:
            return folder
        if check.status == "altered" and not any((folder / file.name).is_file() for file in item.files):
            raise Altered(check.detail)
    folder = writable_dir(data_dir) / FOLDER / name
    troubles = fetch_from_mirrors([file for file in item.files if file.urls], folder)
    lacking = [file.name for file in item.files if not file.urls and not is_published(file, folder / file.name)]
    if lacking:
        troubles.append(f"{', '.join(lacking)}: not publicly downloadable; {item.hint}")
    if troubles:
        raise MissingData(explain_missing_set(item, troubles, data_dir))
    after = check_copy(item, folder, prepared_too=False)
    if not after.usable:
        raise DataError(f"{name} was fetched, but cannot be read: {after.detail}")
    return folder


def explain_missing_set(item: ObjectSet, troubles: list[str], data_dir: Place = None) -> str:
    """Say what to do by hand: each missing file, its address, its checksum and the folder it belongs in."""
    folder = (paths.data_dir(data_dir) / FOLDER / item.name).absolute()
    lines = [f"{item.name} ({item.title}) is not on this machine:", *(f"  {line}" for line in troubles)]
    lines.append(f"Put these files, or what is in them, into {folder}:")
    for file in item.files:
        if not (folder / file.name).is_file():
            lines.append(f"  {file.name}   from {file.urls[0] if file.urls else item.hint}   md5 {file.md5 or 'not published'}")
    return "\n".join([*lines, "or point SELFLESS_DATA (or --data-dir) at a folder whose objects/ has them."])
