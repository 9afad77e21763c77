"""Fit images to 224×224 bytes, in worker processes.

This file imports nothing of the package: it is also run as a script, by its path. So a worker starts in a tenth of a second, nothing is
pickled, and the caller's main module does not run again.

    python -P fitting.py

takes jobs from `selfless.workers.pool`: one line {"folder", "share", "shares"} each on standard input. The folder holds job.json (which
bytes become which row), images.npy (n, 3, 224, 224) and rows.npy (n, 36): for every finished row the SHA-256 of the image file and the
CRC-32 of the result, for every other row zeros. A worker fits the unfinished rows of its share in chunks. It answers {"fitted": n} after
each chunk, {"error": message} if an image cannot be read, and {"finished": true} at the end of a job.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SHORT, SIDE = 256, 224  # the short side is scaled to 256, then the centre of 224 × 224 is cropped
SHAPE = (3, SIDE, SIDE)
ROW = 36
CHUNK = 16

Box = tuple[float, float, float, float]


def fit(data: bytes, box: Box | None = None, trim: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return one image as (3, 224, 224): `box` without the `trim` lowest rows, its short side scaled to 256, its centre cropped.

    The pixels are those of resizing the whole box and then cropping (bilinear with antialiasing, as in PIL and torchvision), but only
    the crop is computed. A JPEG of more than twice the size is decoded at a half, a quarter or an eighth.
    """
    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
        left, top, right, bottom = box or (0, 0, width, height)
        left, top, right, bottom = max(0, left), max(0, top), min(width, right), min(height - trim, bottom)
        w, h = right - left, bottom - top
        if w < 1 or h < 1:
            raise ValueError(f"the box {box} without {trim} rows leaves nothing of an image of {width}×{height}")
        scale = min(w, h) / SHORT
        long = int(max(w, h) / scale)
        new = (SHORT, long) if w <= h else (long, SHORT)
        image.draft("RGB", (math.ceil(width / scale), math.ceil(height / scale)))  # for a JPEG: decode it smaller, but not below this size
        x, y = image.size[0] / width, image.size[1] / height
        whole = image.convert("RGB")
    at = (round((new[0] - SIDE) / 2), round((new[1] - SIDE) / 2))
    part = [left + at[0] * w / new[0], top + at[1] * h / new[1], left + (at[0] + SIDE) * w / new[0], top + (at[1] + SIDE) * h / new[1]]
    inside = (part[0] * x, part[1] * y, min(part[2] * x, whole.width), min(part[3] * y, whole.height))
    small = whole.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=inside)
    return np.ascontiguousarray(np.asarray(small, dtype=np.uint8).transpose(2, 0, 1))


def work(folder: Path, share: int, shares: int, report: Callable[[int], None]) -> None:
    """Fit the unfinished rows of one share; call `report` with the size of each chunk. Raise ValueError if an image is unreadable."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    images = np.load(folder / "images.npy", mmap_mode="r+", allow_pickle=False)
    rows = np.load(folder / "rows.npy", mmap_mode="r+", allow_pickle=False)
    for start in range(share * CHUNK, len(job["items"]), shares * CHUNK):
        chunk = range(start, min(start + CHUNK, len(job["items"])))
        for row in chunk:
            if rows[row].any():
                continue
            at, offset, size, box, trim, name = job["items"][row]
            try:
                with open(job["files"][at], "rb") as file:
                    file.seek(offset)
                    data = file.read(size)
                if len(data) != size:
                    raise ValueError(f"only {len(data)} of {size} bytes are there")
                result = fit(data, box, trim)
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                raise ValueError(f"{name} is not a readable image ({error}); fetch it again") from error
            images[row] = result
            rows[row] = np.frombuffer(hashlib.sha256(data).digest() + struct.pack("<I", zlib.crc32(result.tobytes())), np.uint8)
        report(len(chunk))


def main() -> int:
    """Do the jobs on standard input; return the exit status."""

    def say(**message: Any) -> None:
        print(json.dumps(message), flush=True)

    try:
        for line in sys.stdin:
            job = json.loads(line)
            work(Path(job["folder"]), job["share"], job["shares"], lambda n: say(fitted=n))
            say(finished=True)
    except ValueError as error:
        say(error=str(error))
        return 3
    except BrokenPipeError:  # the process that started this one is gone
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
