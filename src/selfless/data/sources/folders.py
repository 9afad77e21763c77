"""Folders of images as a Source: one folder per task, one folder per class."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from selfless.data.errors import DataError, MissingData
from selfless.data.images import GREY, Shape, decode_images
from selfless.data.paths import cache_dir, make_folder
from selfless.data.rng import split_by_class
from selfless.data.sources.base import Source, per_channel
from selfless.files import write_json

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
MIXED_SIZE = 64  # the side of images whose sizes differ, unless size= is given

Row = tuple[str, int, str]  # path below the top folder, task number, class


class FolderTree(NamedTuple):
    """A Source read from folders, the task number of each image, the names of the tasks, and a remark for results (or None)."""

    source: Source
    tasks_train: Tensor
    tasks_test: Tensor
    names: list[str]
    note: str | None


def read_folders(
    place: Path,
    *,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    test_share: float = 0.2,
    task_order: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int = 0,
) -> FolderTree:
    """Read PLACE/<task>/<train|test>/<class>/*.png, or PLACE/<task>/<class>/*.png with a random `test_share` for testing."""
    if not place.is_dir():
        raise MissingData(f"{place} is not a folder; folders:PATH needs PATH/<task>/<train|test>/<class>/*.png")
    found = task_folders(place)
    names = list(task_order) if task_order is not None else found
    if not found:
        raise DataError(f"{place} has no folder of a task; put images into {place}/<task>/<class>/*.png")
    unknown = [name for name in names if name not in found]
    if not names or unknown or len(set(names)) < len(names):
        wrong = f"names {unknown[0]!r}, which is no folder of" if unknown else "names a folder twice, or none, of"
        raise DataError(f"task_order {wrong} {place}; list its folders once each: {', '.join(found)}")
    train, test = _list_images(place, names, test_share, seed)
    files = [file for file, _, _ in (*train, *test)]
    mark = hashlib.sha256()
    for file in files:
        stat = (place / file).stat()
        mark.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    shape, note = _choose_shape(place, files, mark.hexdigest(), size, channels)
    images = torch.from_numpy(decode_images(mark.hexdigest(), files, lambda file: (place / file).read_bytes(), shape, place.name))
    classes = sorted({c for _, _, c in (*train, *test)}, key=natural_key)
    number = {c: i for i, c in enumerate(classes)}
    labels = torch.tensor([number[c] for _, _, c in (*train, *test)])
    tasks = torch.tensor([t for _, t, _ in (*train, *test)])
    cut = len(train)
    halves = (images[:cut], labels[:cut]), (images[cut:], labels[cut:])
    source = Source(place.name, *halves, tuple(classes), per_channel(mean, "mean"), per_channel(std, "std"))
    return FolderTree(source, tasks[:cut], tasks[cut:], names, note)


def task_folders(place: Path) -> list[str]:
    """Return the folders of the tasks in the order in which they are learnt: by name, with task2 before task10."""
    return sorted((p.name for p in place.iterdir() if p.is_dir() and not p.name.startswith(".")), key=natural_key)


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sorting key that puts task2 before task10, and numbers before letters."""
    pieces = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple((0, int(piece), "") if piece.isdigit() else (1, 0, piece) for piece in pieces)


def _list_images(place: Path, names: list[str], share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Return the training and test images of all tasks."""

    def list_folder(folder: Path, task: int) -> list[Row]:
        classes = sorted((p for p in folder.iterdir() if p.is_dir()), key=lambda p: natural_key(p.name))
        return [
            (file.relative_to(place).as_posix(), task, kind.name)
            for kind in classes
            for file in sorted(kind.rglob("*"), key=lambda p: natural_key(p.as_posix()))
            if file.suffix.lower() in ENDINGS and file.is_file()
        ]

    train: list[Row] = []
    test: list[Row] = []
    for t, name in enumerate(names):
        folder = place / name
        halves = [folder / "train", next((folder / n for n in ("test", "val") if (folder / n).is_dir()), folder / "test")]
        if all(half.is_dir() for half in halves):
            rows, aside = list_folder(halves[0], t), list_folder(halves[1], t)
        else:
            every = list_folder(folder, t)
            number = {c: i for i, c in enumerate(dict.fromkeys(c for _, _, c in every))}
            labels = np.array([number[c] for _, _, c in every], dtype=np.int64)
            kept, taken = split_by_class(labels, share, seed, f"test {name}")
            rows, aside = [every[i] for i in kept], [every[i] for i in taken]
        if not rows or not aside:
            raise DataError(
                f"{folder} has {len(rows)} training and {len(aside)} test images; put them into {name}/<train|test>/<class>/*.png or "
                f"{name}/<class>/*.png, one folder per class inside the folder of each task"
            )
        train, test = [*train, *rows], [*test, *aside]
    return train, test


def _choose_shape(
    place: Path, files: list[str], mark: str, size: int | tuple[int, int] | None, channels: int | None
) -> tuple[Shape, str | None]:
    """Return the (C, H, W) of all images, and a note if images have to be resized to it.

    Reading the header of every image takes a while, so the sizes are kept in the cache.
    """
    path = cache_dir() / "decoded" / f"{mark[:24]}.sizes.json"
    try:
        seen = json.loads(path.read_text())
    except (OSError, ValueError):
        sizes, grey = set(), True
        for file in files:
            try:
                with Image.open(place / file) as image:
                    sizes.add((image.height, image.width))
                    grey = grey and image.mode in GREY
            except UnidentifiedImageError:
                raise DataError(
                    f"{place / file} is not a readable image: it is in no format that Pillow knows; remove or replace it"
                ) from None
            except (OSError, SyntaxError, ValueError) as error:
                raise DataError(f"{place / file} is not a readable image ({error}); remove or replace it") from error
        seen = {"sizes": [list(one) for one in sorted(sizes)], "grey": grey}
        make_folder(path.parent)
        write_json(path, seen)
    wanted = (size, size) if isinstance(size, int) else size
    height, width = wanted or (seen["sizes"][0] if len(seen["sizes"]) == 1 else (MIXED_SIZE, MIXED_SIZE))
    note = f"{place.name}: images of {len(seen['sizes'])} sizes were fitted to {height}×{width}"
    depth = channels or (1 if seen["grey"] else 3)
    return (depth, height, width), None if seen["sizes"] == [[height, width]] or len(seen["sizes"]) == 1 else note
