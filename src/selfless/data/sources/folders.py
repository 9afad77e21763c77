"""Folders of images as a stream: a folder a task, a folder a class."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from selfless.data.cache import Source
from selfless.data.custom import grouped
from selfless.data.images import decoded
from selfless.data.paths import DataError, MissingData, cache_dir, making
from selfless.data.rng import stratified
from selfless.data.streams import Stream

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
MIXED_SIZE = 64  # the side images of differing sizes get, unless size= says otherwise


def from_folders(
    path: str | os.PathLike[str],
    *,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    test_share: float = 0.2,
    task_order: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int = 0,
    **options: Any,
) -> Stream:
    """PATH/<task>/<train|test>/<class>/*.png, or PATH/<task>/<class>/*.png with a seeded `test_share` as test.

    Tasks come in natural order (task2 before task10) or `task_order`. Images keep their size if they agree, else all
    get `size` (64 unless given), never distorted; grey stays grey only if every image is grey.
    """
    place = Path(path).expanduser()
    if not place.is_dir():
        raise MissingData(f"{place} is not a folder; folders:PATH needs PATH/<task>/<train|test>/<class>/*.png")
    found = sorted((p.name for p in place.iterdir() if p.is_dir() and not p.name.startswith(".")), key=natural)
    names = list(task_order) if task_order is not None else found
    if not names or set(names) - set(found):
        raise DataError(f"{place} has the tasks {', '.join(found) or 'none'}, not {', '.join(names) or 'any folder'}")
    train, test = _listing(place, names, test_share, seed)
    files = [file for file, _, _ in (*train, *test)]
    mark = hashlib.sha256()
    for file in files:
        stat = (place / file).stat()
        mark.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    shape, note = _shape(place, files, mark.hexdigest(), size, channels)
    images = torch.from_numpy(decoded(mark.hexdigest(), files, lambda file: (place / file).read_bytes(), shape, place.name))
    classes = sorted({c for _, _, c in (*train, *test)}, key=natural)
    number = {c: i for i, c in enumerate(classes)}
    labels = torch.tensor([number[c] for _, _, c in (*train, *test)])
    tasks = torch.tensor([t for _, t, _ in (*train, *test)])
    cut = len(train)
    scale = (None if mean is None else tuple(mean), None if std is None else tuple(std))
    source = Source(place.name, (images[:cut], labels[:cut]), (images[cut:], labels[cut:]), tuple(classes), *scale)
    made = grouped(source, tasks[:cut], tasks[cut:], names=names, seed=seed, **options)
    return made if note is None else replace(made, notes=(*made.notes, note))


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """task2 before task10, and numbers before letters."""
    pieces = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple((0, int(piece), "") if piece.isdigit() else (1, 0, piece) for piece in pieces)


Row = tuple[str, int, str]  # path below the top, task number, class


def _listing(place: Path, names: list[str], share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Every image of every task, as training and test rows."""

    def below(folder: Path, task: int) -> list[Row]:
        classes = sorted((p for p in folder.iterdir() if p.is_dir()), key=lambda p: natural(p.name))
        return [
            (file.relative_to(place).as_posix(), task, kind.name)
            for kind in classes
            for file in sorted(kind.rglob("*"), key=lambda p: natural(p.as_posix()))
            if file.suffix.lower() in ENDINGS and file.is_file()
        ]

    train: list[Row] = []
    test: list[Row] = []
    for t, name in enumerate(names):
        folder = place / name
        halves = [folder / "train", next((folder / n for n in ("test", "val") if (folder / n).is_dir()), folder / "test")]
        if all(half.is_dir() for half in halves):
            rows, aside = below(halves[0], t), below(halves[1], t)
        else:
            every = below(folder, t)
            number = {c: i for i, c in enumerate(dict.fromkeys(c for _, _, c in every))}
            labels = np.array([number[c] for _, _, c in every], dtype=np.int64)
            kept, taken = stratified(labels, share, seed, f"test {name}")
            rows, aside = [every[i] for i in kept], [every[i] for i in taken]
        if not rows or not aside:
            raise DataError(
                f"{folder} has {len(rows)} training and {len(aside)} test images; expected "
                f"{name}/<train|test>/<class>/*.png or {name}/<class>/*.png"
            )
        train, test = [*train, *rows], [*test, *aside]
    return train, test


def _shape(
    place: Path, files: list[str], mark: str, size: int | tuple[int, int] | None, channels: int | None
) -> tuple[tuple[int, int, int], str | None]:
    """The common (C, H, W), and a note if images had to be brought to it. The look at every header is remembered."""
    path = cache_dir() / "decoded" / f"{mark[:24]}.sizes.json"
    try:
        seen = json.loads(path.read_text())
    except (OSError, ValueError):
        sizes, grey = set(), True
        for file in files:
            try:
                with Image.open(place / file) as image:
                    sizes.add((image.height, image.width))
                    grey = grey and image.mode in ("1", "L", "I;16", "LA")
            except (OSError, SyntaxError, ValueError) as error:
                raise DataError(f"{place / file} is not a readable image ({error})") from error
        seen = {"sizes": sorted(sizes), "grey": grey}
        with making(path) as draft:
            draft.write_text(json.dumps(seen))
    wanted = (size, size) if isinstance(size, int) else size
    height, width = wanted or (seen["sizes"][0] if len(seen["sizes"]) == 1 else (MIXED_SIZE, MIXED_SIZE))
    note = f"{place.name}: images of {len(seen['sizes'])} sizes were fitted to {height}×{width}"
    depth = channels or (1 if seen["grey"] else 3)
    return (depth, height, width), None if seen["sizes"] == [[height, width]] or len(seen["sizes"]) == 1 else note
