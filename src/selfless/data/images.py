"""Encoded images → one uint8 array, decoded once and kept in the cache as a plain .npy that is memory-mapped."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from selfless.data.checksums import Altered, digest
from selfless.data.paths import cache_dir, making
from selfless.data.progress import bar

Bytes = npt.NDArray[np.uint8]
VERSION = 1  # part of the key: a change in how images are decoded must not find the old arrays
AT_ONCE = 512


def decode(data: bytes, shape: tuple[int, int, int], what: str) -> Bytes:
    """(C, H, W) of one image. Greyscale becomes RGB (or RGB grey, if C is 1); another size is fitted: scaled to cover,
    then cropped at the centre, so that nothing is distorted.
    """
    channels, height, width = shape
    try:
        with Image.open(io.BytesIO(data)) as opened:
            image = opened.convert("RGB" if channels == 3 else "L")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise Altered(f"{what} is not a readable image ({error})") from error
    if image.size != (width, height):
        image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
    array = np.asarray(image, dtype=np.uint8).reshape(height, width, channels)
    return np.ascontiguousarray(array.transpose(2, 0, 1))


def decoded(mark: str, names: Sequence[str], read: Callable[[str], bytes], shape: tuple[int, int, int], label: str) -> Bytes:
    """(n, C, H, W), from the cache where it is there and unaltered, else decoded with a progress bar and kept.

    `mark` stands for the content of all the images: another mark, another array.
    """
    key = hashlib.sha256("\0".join([str(VERSION), mark, str(shape), *names]).encode()).hexdigest()[:24]
    path = cache_dir() / "decoded" / f"{key}.npy"
    if not _intact(path):
        with making(path) as draft:
            _decode_into(draft, names, read, shape, label)
        _note(path, digest(path))
    # copy-on-write: the file stays as it is whatever a caller does, and torch takes the array as writable
    array: Bytes = np.load(path, mmap_mode="c", allow_pickle=False)
    return array


def _decode_into(draft: Path, names: Sequence[str], read: Callable[[str], bytes], shape: tuple[int, int, int], label: str) -> None:
    array = np.lib.format.open_memmap(draft, mode="w+", dtype=np.uint8, shape=(len(names), *shape))
    with bar(f"decoding {label}", len(names), unit="images") as progress, ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(names), AT_ONCE):
            some = names[start : start + AT_ONCE]
            jobs = [pool.submit(decode, read(name), shape, name) for name in some]
            for i, job in enumerate(jobs):
                array[start + i] = job.result()
            progress.update(len(some))
    array.flush()


def _note(path: Path, sha256: str) -> None:
    """Beside the array: its checksum, and the size and time it had when that was taken."""
    stat = path.stat()
    with making(path.with_suffix(".json")) as draft:
        draft.write_text(json.dumps({"sha256": sha256, "size": stat.st_size, "time": stat.st_mtime_ns}))


def _intact(path: Path) -> bool:
    """Unchanged since it was written: by size and time, which costs nothing, else (a copied cache) by checksum."""
    with suppress(OSError, ValueError, KeyError):
        note, stat = json.loads(path.with_suffix(".json").read_text()), path.stat()
        if (stat.st_size, stat.st_mtime_ns) == (note["size"], note["time"]):
            return True
        if stat.st_size == note["size"] and digest(path) == note["sha256"]:
            _note(path, note["sha256"])
            return True
    return False
