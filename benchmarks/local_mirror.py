"""A mirror on this machine: two small data sets in their published layouts behind a slow HTTP server, for `kills.py`.

`offer` puts the mirror's addresses and checksums into the catalogues of this process. A process that is forked from it fetches from the
mirror; everything else of `selfless data fetch` and `selfless data prepare` is as it is for the published files.
"""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from selfless.data import CATALOGUE, OBJECTS

PIECE, PAUSE = 1 << 14, 0.01  # the server sends so many bytes, then waits so many seconds: a kill often hits a download
LETTERS = 62 * 4  # images; more than 64 are prepared by worker processes


class _Slow(http.server.BaseHTTPRequestHandler):
    """Send a file of `files` in pieces."""

    files: dict[str, bytes] = {}  # noqa: RUF012  # filled once, before the server starts

    def do_GET(self) -> None:
        content = self.files.get(self.path.removeprefix("/"))
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        try:
            for at in range(0, len(content or b""), PIECE):
                self.wfile.write((content or b"")[at : at + PIECE])
                time.sleep(PAUSE)
        except OSError:  # the process that asked was killed
            pass

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def offer() -> dict[str, bytes]:
    """Start the server; let `mnist` and `letters` be fetched from it. Return the files by name."""
    contents = {file.name: content for file, content in zip(CATALOGUE["mnist"].files, _make_digits(), strict=True)}
    _Slow.files = {name: gzip.compress(content, mtime=0) for name, content in contents.items()} | {"EnglishImg.tgz": _make_letters()}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_address[1]}"
    digits = tuple(
        replace(
            file,
            size=len(_Slow.files[file.name]),
            sha256=hashlib.sha256(_Slow.files[file.name]).hexdigest(),
            urls=(f"{base}/{file.name}",),
            content_sha256=hashlib.sha256(contents[file.name]).hexdigest(),
        )
        for file in CATALOGUE["mnist"].files
    )
    CATALOGUE["mnist"] = replace(CATALOGUE["mnist"], files=digits, wheels=())
    letters, (archive,) = OBJECTS["letters"], OBJECTS["letters"].files
    packed = _Slow.files[archive.name]
    file = replace(archive, size=len(packed), md5=hashlib.md5(packed).hexdigest(), urls=(f"{base}/{archive.name}",))
    OBJECTS["letters"] = replace(letters, files=(file,))
    return _Slow.files


def write_letters(folder: Path) -> Path:
    """Write the archive of `letters` into a data folder; return the folder."""
    place = folder / "objects/letters"
    place.mkdir(parents=True)
    (place / "EnglishImg.tgz").write_bytes(_Slow.files["EnglishImg.tgz"])
    return folder


def _make_digits() -> list[bytes]:
    """Return the contents of four IDX files: images and labels for training, then for testing."""
    rng, made = np.random.default_rng(0), []
    for count in (1000, 200):
        made.append(bytes([0, 0, 8, 3]) + np.array([count, 28, 28], ">u4").tobytes() + rng.bytes(count * 28 * 28))
        made.append(bytes([0, 0, 8, 1]) + np.array([count], ">u4").tobytes() + (np.arange(count) % 10).astype(np.uint8).tobytes())
    return made


def _make_letters() -> bytes:
    """Return a .tgz with some images of each of the 62 letters."""
    rng, out = np.random.default_rng(1), io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for i in range(LETTERS):
            picture = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (40, 30, 3)).astype(np.uint8)).save(picture, "PNG")
            name = f"English/Img/GoodImg/Bmp/Sample{i % 62 + 1:03d}/img{i % 62 + 1:03d}-{i // 62 + 1:05d}.png"
            info = tarfile.TarInfo(name)
            info.size = len(picture.getvalue())
            tar.addfile(info, io.BytesIO(picture.getvalue()))
    return out.getvalue()
