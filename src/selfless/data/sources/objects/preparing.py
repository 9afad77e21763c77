"""Preparing a set once: every image at 224×224 in one memory-mapped array, in the user's cache.

`<cache>/objects/<name>-<key>/` holds images.npy, labels.npy, rows.npy (checksums) and about.json (what it is, out of which files, by which
split). It is made in a folder called `….part`, which a killed process leaves behind and the next one goes on with, and gets its name in
one step when it is whole. The key stands for the files it was made of and the options; a prepared set whose files are gone is still used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from selfless.data.checksums import Altered, digest
from selfless.data.paths import DataError, cache_dir
from selfless.data.progress import bar
from selfless.data.sources.objects import fitting
from selfless.data.sources.objects.files import Shelf, Slice, forget_unpacked
from selfless.data.sources.objects.listing import Listing
from selfless.files import locked, write_json

VERSION = 1  # part of the key: a change in how images are fitted must not find the old arrays
FEW = 64  # so few images are done here, without workers


@dataclass(frozen=True)
class Prepared:
    """A finished folder. `fresh`: images that were fitted just now, and the seconds that took; (0, 0.0) for what was there already."""

    folder: Path
    about: Mapping[str, Any]
    fresh: tuple[int, float] = (0, 0.0)

    @property
    def cut(self) -> int:
        return int(self.about["train"])

    @property
    def digest(self) -> str:
        """Of the images' own bytes, what part of each was taken, their labels and halves: the same wherever the same is prepared."""
        told = [self.about[name] for name in ("set", "version", "options", "train", "test", "classes", "images_sha256")]
        rows = np.load(self.folder / "rows.npy", allow_pickle=False)
        total = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
        total.update(self.labels().tobytes())
        total.update(rows.tobytes())
        return total.hexdigest()

    def images(self) -> npt.NDArray[np.uint8]:
        """(n, 3, 224, 224), training images first. Copy-on-write: whatever a caller does, the file stays as it is."""
        array: npt.NDArray[np.uint8] = np.load(self.folder / "images.npy", mmap_mode="c", allow_pickle=False)
        return array

    def labels(self) -> npt.NDArray[np.int64]:
        array: npt.NDArray[np.int64] = np.load(self.folder / "labels.npy", allow_pickle=False)
        return array


def home() -> Path:
    return cache_dir() / "objects"


def key(name: str, mark: str, options: Mapping[str, Any]) -> str:
    words = json.dumps([VERSION, fitting.SHORT, fitting.SIDE, name, mark, dict(options)], sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def opened(folder: Path) -> Prepared | None:
    """A finished folder, or None if there is none or its array has not the size it should have."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        if (folder / "images.npy").stat().st_size == about["array_bytes"] and (folder / "labels.npy").is_file():
            return Prepared(folder, about)
    return None


def copies(name: str) -> list[Prepared]:
    """Every prepared copy of a set, the newest first."""
    found = [p for folder in home().glob(f"{name}-*") if folder.suffix != ".part" and (p := opened(folder)) is not None]
    return sorted(found, key=lambda p: (p.folder / "about.json").stat().st_mtime_ns, reverse=True)


def kept(name: str, options: Mapping[str, Any]) -> Prepared | None:
    """The newest prepared copy of a set with these options, whatever it was made of: for when the files themselves are gone."""
    return next((p for p in copies(name) if p.about["options"] == dict(options)), None)


def prepare(name: str, shelf: Shelf, listing: Listing, options: Mapping[str, Any], workers: int | None = None) -> Prepared:
    """Fits every image of the listing, or goes on where an earlier call was stopped. `workers`: processes, one a core unless given."""
    final = home() / f"{name}-{key(name, shelf.mark, options)}"
    part = final.with_name(final.name + ".part")
    try:
        home().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot write to {home()} ({error}); set XDG_CACHE_HOME to a folder you own") from error
    busy = f"another process is preparing {name}; waiting for it"
    with locked(final.with_suffix(".lock"), lambda: print(busy, file=sys.stderr)):
        if (there := opened(final)) is not None:
            return there
        began = time.perf_counter()
        items = listing.items
        _begin(part, shelf, listing)
        before = int(np.load(part / "rows.npy", mmap_mode="r", allow_pickle=False).any(1).sum())
        with bar(f"preparing {name}", len(items), unit="images") as progress:
            count = os.cpu_count() or 1 if workers is None else workers
            if len(items) - before <= FEW or count < 1:
                try:
                    fitting.work(part, 0, 1, progress.update)
                except ValueError as error:
                    raise Altered(f"{shelf.folder}: {error}") from error
            else:
                _by_workers(part, count, shelf, progress.update)
        seconds = time.perf_counter() - began
        about = _finish(part, name, shelf, listing, options)
        shutil.rmtree(final, ignore_errors=True)  # not whole, or `opened` had found it
        os.replace(part, final)
        forget_unpacked(shelf)
    return Prepared(final, about, (len(items) - before, seconds))


def _begin(part: Path, shelf: Shelf, listing: Listing) -> None:
    """The folder with its job and empty arrays; left as it is if it is of the same job and was written since the machine was started."""
    where = _pictures(part, listing) if listing.pictures is not None else [shelf.slice(i.name, _source(listing)) for i in listing.items]
    files = {path: i for i, path in enumerate(dict.fromkeys(w.path for w in where))}
    pairs = zip(listing.items, where, strict=True)
    items = [[files[w.path], w.offset, w.size, item.box, item.trim, item.name] for item, w in pairs]
    job = json.dumps({"boot": _boot(), "files": list(files), "items": items})
    with contextlib.suppress(OSError, ValueError):
        shape = np.load(part / "images.npy", mmap_mode="r", allow_pickle=False).shape
        rows = np.load(part / "rows.npy", mmap_mode="r", allow_pickle=False).shape
        if (part / "job.json").read_text(encoding="utf-8") == job and (shape[0], *rows) == (len(items), len(items), fitting.ROW):
            return
    part.mkdir(exist_ok=True)
    needed, free = len(items) * int(np.prod(fitting.SHAPE)), shutil.disk_usage(part).free
    if needed > free:
        raise DataError(f"{len(items)} images take {needed / 1e9:.1f} GB in {part.parent}, where {free / 1e9:.1f} GB are free; make room")
    for name in ("job.json", "rows.npy", "images.npy"):
        (part / name).unlink(missing_ok=True)
    np.lib.format.open_memmap(part / "images.npy", mode="w+", dtype=np.uint8, shape=(len(items), *fitting.SHAPE))
    np.lib.format.open_memmap(part / "rows.npy", mode="w+", dtype=np.uint8, shape=(len(items), fitting.ROW))
    (part / "job.json").write_text(job, encoding="utf-8")


def _source(listing: Listing) -> str:
    return " or ".join(listing.annotations) or "the folder"


def _boot() -> str:
    """What the kernel calls this start of the machine: after a power cut, pages that were not written yet may be lost."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _pictures(part: Path, listing: Listing) -> list[Slice]:
    """Pictures that are no files, as one file of PPMs, which every worker can read."""
    assert listing.pictures is not None
    n, height, width, _ = listing.pictures.shape
    head = f"P6\n{width} {height}\n255\n".encode()
    size, path = len(head) + 3 * height * width, part / "pictures.ppm"
    if not path.is_file() or path.stat().st_size != n * size:
        part.mkdir(exist_ok=True)
        with path.open("wb") as out:
            for picture in listing.pictures:
                out.write(head + picture.tobytes())
    return [Slice(str(path), i * size, size) for i in range(n)]


def _by_workers(part: Path, count: int, shelf: Shelf, update: Any) -> None:
    """Starts `count` workers and waits for them; the first error ends them all."""
    command = [sys.executable, "-P", fitting.__file__, str(part)]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    said: queue.Queue[tuple[int, str]] = queue.Queue()
    running = [
        subprocess.Popen([*command, str(i), str(count)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=quiet)
        for i in range(count)
    ]

    def listen(worker: int) -> None:
        stream = running[worker].stdout
        assert stream is not None
        for line in stream:
            said.put((worker, line))
        said.put((worker, ""))

    threads = [threading.Thread(target=listen, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    try:
        open_ends = count
        while open_ends:
            worker, line = said.get()
            if line.startswith("{"):
                raise Altered(f"{shelf.folder}: {json.loads(line)['error']}")
            if line:
                update(int(line))
                continue
            open_ends -= 1
            if code := running[worker].wait():
                raise DataError(f"a worker that prepared images ended with status {code}; run it again: it goes on where it stopped")
    finally:
        for process in running:
            process.kill()
            process.wait()
        for thread in threads:
            thread.join()
        for process in running:
            if process.stdout is not None:
                process.stdout.close()


def _finish(part: Path, name: str, shelf: Shelf, listing: Listing, options: Mapping[str, Any]) -> dict[str, Any]:
    """Labels and about.json, and everything on disk before the folder gets its name."""
    rows = np.load(part / "rows.npy", mmap_mode="r", allow_pickle=False)
    if not rows.any(1).all():
        raise DataError(f"{int((~rows.any(1)).sum())} images of {name} were not prepared; run it again: it goes on where it stopped")
    np.save(part / "labels.npy", listing.labels())
    sources = {path.name: {"bytes": path.stat().st_size, "sha256": digest(path)} for path in shelf.archives.values()}
    for annotation in listing.annotations:
        data = shelf.read(annotation)
        sources[annotation] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    about = {
        "set": name,
        "version": VERSION,
        "options": dict(options),
        "train": len(listing.train),
        "test": len(listing.test),
        "classes": list(listing.classes),
        "split": listing.split,
        "shape": list(fitting.SHAPE),
        "how": f"short side {fitting.SHORT}, centre {fitting.SIDE}, bilinear",
        "files": sources,
        "images_sha256": hashlib.sha256(np.ascontiguousarray(rows[:, :32]).tobytes()).hexdigest(),  # of every image's own, in order
        "array_bytes": (part / "images.npy").stat().st_size,
    }
    for file in ("images.npy", "rows.npy", "labels.npy"):
        with (part / file).open("rb+") as f:
            os.fsync(f.fileno())
    write_json(part / "about.json", about)
    for file in ("job.json", "pictures.ppm"):
        (part / file).unlink(missing_ok=True)
    return about


def recheck(prepared: Prepared) -> None:
    """Reads every prepared image again and compares it with its checksum; `Altered` if one has changed."""
    images, rows = prepared.images(), np.load(prepared.folder / "rows.npy", mmap_mode="r", allow_pickle=False)
    sums = np.ascontiguousarray(rows[:, 32:]).view("<u4").ravel()
    for row, wanted in enumerate(sums):
        if zlib.crc32(images[row].tobytes()) != int(wanted):
            raise Altered(f"{prepared.folder}: image {row} has changed since it was prepared; delete the folder and prepare it again")
