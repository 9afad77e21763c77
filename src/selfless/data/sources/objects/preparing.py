"""Prepare an object set once: every image at 224×224 in one memory-mapped array, in the user's cache.

`<cache>/objects/<name>-<key>/` holds images.npy, labels.npy, rows.npy (checksums) and about.json (what it is, from which files, with
which split). It is made in a folder called `….part`, which is renamed when it is complete. A killed process leaves that folder behind,
and the next one continues with it. The key depends on the files and the options; a prepared set whose files are gone is still used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from selfless.data.checksums import file_digest
from selfless.data.errors import Altered, DataError
from selfless.data.paths import cache_dir, make_folder, write_file
from selfless.data.progress import progress_bar
from selfless.data.sources.objects import fitting
from selfless.data.sources.objects.files import SetFiles, Slice, remove_decompressed
from selfless.data.sources.objects.listing import Listing
from selfless.files import locked, write_json, write_text
from selfless.workers import Pool, WorkerDied

VERSION = 1  # part of the key: change it with the way images are fitted
FEW = 64  # up to this many images are fitted in this process, without workers


@dataclass(frozen=True)
class Prepared:
    """A complete prepared set.

    about   the content of about.json
    fresh   (images that were fitted just now, seconds that took); (0, 0.0) if it was prepared before
    """

    folder: Path
    about: Mapping[str, Any]
    fresh: tuple[int, float] = (0, 0.0)

    @property
    def cut(self) -> int:
        """The number of training images; they come first."""
        return int(self.about["train"])

    @property
    def digest(self) -> str:
        """A hash of the image files, the crops, the labels and the halves: equal wherever the same set is prepared."""
        facts = [self.about[name] for name in ("set", "version", "options", "train", "test", "classes", "images_sha256")]
        rows = np.load(self.folder / "rows.npy", allow_pickle=False)
        total = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        total.update(self.labels().tobytes())
        total.update(rows.tobytes())
        return total.hexdigest()

    def images(self) -> npt.NDArray[np.uint8]:
        """Return (n, 3, 224, 224), training images first, memory-mapped copy-on-write: a caller cannot change the file."""
        array: npt.NDArray[np.uint8] = np.load(self.folder / "images.npy", mmap_mode="c", allow_pickle=False)
        return array

    def labels(self) -> npt.NDArray[np.int64]:
        """Return (n,), training images first."""
        array: npt.NDArray[np.int64] = np.load(self.folder / "labels.npy", allow_pickle=False)
        return array


def prepared_dir() -> Path:
    """Return the folder of the prepared sets."""
    return cache_dir() / "objects"


def _folder_of(name: str, mark: str, options: Mapping[str, Any]) -> Path:
    words = json.dumps([VERSION, fitting.SHORT, fitting.SIDE, name, mark, dict(options)], sort_keys=True)
    return prepared_dir() / f"{name}-{hashlib.sha256(words.encode()).hexdigest()[:16]}"


def open_prepared(folder: Path) -> Prepared | None:
    """Return the prepared set in `folder`; None if there is none, or if its array has the wrong size."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        if (folder / "images.npy").stat().st_size == about["array_bytes"] and (folder / "labels.npy").is_file():
            return Prepared(folder, about)
    return None


def find_prepared(name: str, mark: str, options: Mapping[str, Any]) -> Prepared | None:
    """Return the set prepared with these options from files with this mark, or None."""
    return open_prepared(_folder_of(name, mark, options))


def all_prepared(name: str) -> list[Prepared]:
    """Return every prepared copy of a set, the newest first."""
    folders = [folder for folder in prepared_dir().glob(f"{name}-*") if folder.suffix != ".part"]
    found = [prepared for folder in folders if (prepared := open_prepared(folder)) is not None]
    return sorted(found, key=lambda p: (p.folder / "about.json").stat().st_mtime_ns, reverse=True)


def newest_prepared(name: str, options: Mapping[str, Any]) -> Prepared | None:
    """Return the newest prepared copy of a set with these options, whatever its files were: they may be gone."""
    return next((p for p in all_prepared(name) if p.about["options"] == dict(options)), None)


def prepare(name: str, files: SetFiles, listing: Listing, options: Mapping[str, Any], workers: int | None = None) -> Prepared:
    """Fit every image of the listing, or continue where an earlier call was stopped. `workers`: processes; one per core if None."""
    make_folder(prepared_dir())
    final = _folder_of(name, files.mark, options)
    part = final.with_name(final.name + ".part")
    busy = f"another process is preparing {name}; waiting for it"
    with locked(final.with_suffix(".lock"), lambda: print(busy, file=sys.stderr)):
        if (there := open_prepared(final)) is not None:
            return there
        began = time.perf_counter()
        items = listing.items
        _begin(part, files, listing)
        before = int(np.load(part / "rows.npy", mmap_mode="r", allow_pickle=False).any(1).sum())
        with progress_bar(f"preparing {name}", len(items), unit="images") as bar:
            count = os.cpu_count() or 1 if workers is None else workers
            if len(items) - before <= FEW or count < 1:
                try:
                    fitting.work(part, 0, 1, bar.update)
                except ValueError as error:
                    raise Altered(f"{files.folder}: {error}") from error
            else:
                _fit_with_workers(part, count, files, bar.update)
        seconds = time.perf_counter() - began
        about = _finish(part, name, files, listing, options)
        shutil.rmtree(final, ignore_errors=True)  # incomplete, else `open_prepared` would have returned it
        os.replace(part, final)
        remove_decompressed(files)
    return Prepared(final, about, (len(items) - before, seconds))


def _begin(part: Path, files: SetFiles, listing: Listing) -> None:
    """Make the folder with the job and empty arrays. Keep it if it has the same job and the machine has not been restarted since."""
    if listing.pictures is not None:
        where = _write_pictures(part, listing)
    else:
        where = [files.locate(item.name, " or ".join(listing.annotations) or "the folder") for item in listing.items]
    numbers = {path: i for i, path in enumerate(dict.fromkeys(w.path for w in where))}
    pairs = zip(listing.items, where, strict=True)
    items = [[numbers[w.path], w.offset, w.size, item.box, item.trim, item.name] for item, w in pairs]
    job = json.dumps({"boot": boot_id(), "files": list(numbers), "items": items})
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
    write_text(part / "job.json", job)


def boot_id() -> str:
    """Return the kernel's name of this start of the machine: pages that were not yet written may be lost in a power cut."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _write_pictures(part: Path, listing: Listing) -> list[Slice]:
    """Write pictures that are not files into one file of PPMs, which every worker can read."""
    assert listing.pictures is not None
    n, height, width, _ = listing.pictures.shape
    head = f"P6\n{width} {height}\n255\n".encode()
    size, path, pictures = len(head) + 3 * height * width, part / "pictures.ppm", listing.pictures
    if not path.is_file() or path.stat().st_size != n * size:

        def write(temporary: Path) -> None:
            with temporary.open("wb") as out:
                for picture in pictures:
                    out.write(head + picture.tobytes())

        write_file(path, write)
    return [Slice(str(path), i * size, size) for i in range(n)]


def _fit_with_workers(part: Path, count: int, files: SetFiles, update: Any) -> None:
    """Fit the images in `count` worker processes, a share each; the first error stops all."""
    jobs = [{"folder": str(part), "share": share, "shares": count} for share in range(count)]

    def receive(_: int, message: dict[str, Any]) -> None:
        if "error" in message:
            raise Altered(f"{files.folder}: {message['error']}")
        update(message["fitted"])

    try:
        Pool([sys.executable, "-P", fitting.__file__], count).run(jobs, receive)
    except WorkerDied as death:
        raise DataError(
            f"a worker that prepared images ended with status {death.status}; run it again: it continues where it stopped"
        ) from death


def _finish(part: Path, name: str, files: SetFiles, listing: Listing, options: Mapping[str, Any]) -> dict[str, Any]:
    """Write labels and about.json, and flush everything to disk before the folder is renamed."""
    rows = np.load(part / "rows.npy", mmap_mode="r", allow_pickle=False)
    if not rows.any(1).all():
        raise DataError(f"{int((~rows.any(1)).sum())} images of {name} were not prepared; run it again: it continues where it stopped")
    np.save(part / "labels.npy", listing.labels())
    sources = {path.name: {"bytes": path.stat().st_size, "sha256": file_digest(path)} for path in files.archives.values()}
    for annotation in listing.annotations:
        data = files.read(annotation)
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
        "images_sha256": hashlib.sha256(np.ascontiguousarray(rows[:, :32]).tobytes()).hexdigest(),  # over the SHA-256 of every image
        "array_bytes": (part / "images.npy").stat().st_size,
    }
    for file in ("images.npy", "rows.npy", "labels.npy"):
        with (part / file).open("rb+") as f:
            os.fsync(f.fileno())
    write_json(part / "about.json", about)
    for file in ("job.json", "pictures.ppm"):
        (part / file).unlink(missing_ok=True)
    return about


def check_prepared(prepared: Prepared) -> None:
    """Compare every prepared image with its checksum. Raise Altered if one has changed."""
    images, rows = prepared.images(), np.load(prepared.folder / "rows.npy", mmap_mode="r", allow_pickle=False)
    sums = np.ascontiguousarray(rows[:, 32:]).view("<u4").ravel()
    for row, wanted in enumerate(sums):
        if zlib.crc32(images[row].tobytes()) != int(wanted):
            raise Altered(f"{prepared.folder}: image {row} has changed since it was prepared; delete the folder and prepare it again")
