"""Decode image files into one uint8 array, once; the array is kept in the cache and memory-mapped."""

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
from PIL import Image, ImageOps, UnidentifiedImageError

from selfless.data.checksums import file_digest
from selfless.data.errors import Altered
from selfless.data.paths import cache_dir, write_file
from selfless.data.progress import progress_bar
from selfless.files import write_json

Bytes = npt.NDArray[np.uint8]
Shape = tuple[int, int, int]
VERSION = 1  # part of the cache key: change it with the way images are decoded
GREY = ("1", "L", "I;16", "LA")  # Pillow's modes of images without colour
BATCH = 512  # images decoded at a time


def decode_image(data: bytes, shape: Shape, what: str) -> Bytes:
    """Decode one image to (C, H, W).

    The image becomes RGB if C is 3, else grey. If it has another size, it is scaled to cover H × W and cropped at the centre, so that
    nothing is distorted.
    """
    channels, height, width = shape
    try:
        with Image.open(io.BytesIO(data)) as opened:
            return fit_image(opened, (height, width), channels)
    except UnidentifiedImageError:  # its text contains the object that was read
        raise Altered(f"{what} is not a readable image: it is in no format that Pillow knows; give a PNG or JPEG file") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise Altered(f"{what} is not a readable image ({error}); write it again, as a PNG or JPEG file") from error


def fit_image(image: Image.Image, size: int | tuple[int, int] | None = None, channels: int | None = None) -> Bytes:
    """Return an image as bytes (C, H, W): its own size and colour, or fitted to (H, W) and grey (1) or RGB (3)."""
    depth = channels or (1 if image.mode in GREY else 3)
    height, width = (image.height, image.width) if size is None else (size, size) if isinstance(size, int) else size
    image = image.convert("RGB" if depth == 3 else "L")
    if image.size != (width, height):
        image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
    array = np.asarray(image, dtype=np.uint8).reshape(height, width, depth)
    return np.array(array.transpose(2, 0, 1), order="C")  # a copy, as PIL gives memory that cannot be written


def decode_images(mark: str, names: Sequence[str], read: Callable[[str], bytes], shape: Shape, label: str) -> Bytes:
    """Return all images as one array (n, C, H, W): from the cache, or decoded now with a progress bar.

    `mark` identifies the content of all the images: a different mark gives a different array.
    """
    key = hashlib.sha256("\0".join([str(VERSION), mark, str(shape), *names]).encode()).hexdigest()[:24]
    path = cache_dir() / "decoded" / f"{key}.npy"
    if not _is_intact(path):
        write_file(path, lambda temporary: _decode_into(temporary, names, read, shape, label))
        _write_note(path, file_digest(path))
    # Copy-on-write: a caller cannot change the file, and torch accepts the array as writable.
    array: Bytes = np.load(path, mmap_mode="c", allow_pickle=False)
    return array


def _decode_into(path: Path, names: Sequence[str], read: Callable[[str], bytes], shape: Shape, label: str) -> None:
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(len(names), *shape))
    with progress_bar(f"decoding {label}", len(names), unit="images") as bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(names), BATCH):
            some = names[start : start + BATCH]
            jobs = [pool.submit(decode_image, read(name), shape, name) for name in some]
            for i, job in enumerate(jobs):
                array[start + i] = job.result()
            bar.update(len(some))
    array.flush()


def _write_note(path: Path, sha256: str) -> None:
    """Write a note beside the array: its checksum, and its size and time when the checksum was computed."""
    stat = path.stat()
    write_json(path.with_suffix(".json"), {"sha256": sha256, "size": stat.st_size, "time": stat.st_mtime_ns})


def _is_intact(path: Path) -> bool:
    """Return whether the array is unchanged: by size and time, which is quick, else by checksum (the cache was copied)."""
    with suppress(OSError, ValueError, KeyError):
        note, stat = json.loads(path.with_suffix(".json").read_text()), path.stat()
        if (stat.st_size, stat.st_mtime_ns) == (note["size"], note["time"]):
            return True
        if stat.st_size == note["size"] and file_digest(path) == note["sha256"]:
            _write_note(path, note["sha256"])
            return True
    return False
