"""ObjectSet: what is known of a published object set, and how to find and read a copy.

The files of a set belong into `objects/<name>/` below the data folder, as they were published, packed or unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfless.data.errors import Altered
from selfless.data.paths import Place, data_dirs
from selfless.data.sources.base import File
from selfless.data.sources.objects.files import PACKED, SetFiles
from selfless.data.sources.objects.listing import Listing

DEFAULTS: dict[str, Any] = {"boxes": False, "aircraft": "variant"}  # the options of the stream that change the prepared images
FOLDER = "objects"  # below the data folder


@dataclass(frozen=True)
class ObjectSet:
    """One published object set.

    read          the reader of its layout
    train, test   the published numbers of images; None if no split is published (then `total` is set), or if an example is a person in
                  an image (Actions; its reader says in the split that the lists are not whole)
    also          archives of another layout that is read too
    options       the stream's options that change the prepared images
    hint          where files without an address can be found
    """

    name: str
    title: str
    read: Callable[[SetFiles, dict[str, Any]], Listing]
    files: tuple[File, ...]
    classes: int
    train: int | None = None
    test: int | None = None
    total: int | None = None
    also: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    hint: str = ""

    @property
    def archives(self) -> tuple[str, ...]:
        """The names of the archives that are looked into."""
        return (*(file.name for file in self.files if file.name.endswith(PACKED)), *self.also)

    @property
    def size(self) -> int:
        """The bytes to download."""
        return sum(file.size for file in self.files)

    def find(self, data_dir: Place = None) -> tuple[Path, ...]:
        """Return the folders of this set, below the data folders, that hold any file."""
        places = [root / FOLDER / self.name for root in data_dirs(data_dir)]
        return tuple(p for p in places if p.is_dir() and any(f.is_file() and not f.name.startswith(".") for f in p.rglob("*")))

    def open(self, folder: Path) -> SetFiles:
        """Return access to the files of the copy in `folder`."""
        return SetFiles(folder, self.archives)

    def list_images(self, files: SetFiles, options: dict[str, Any]) -> Listing:
        """Read the layout. Raise Altered if a half is empty, or if an image is for training and for testing."""
        listing = self.read(files, options)
        if not listing.train or not listing.test:
            raise Altered(f"{files.folder} lists {len(listing.train)} training and {len(listing.test)} test images; fetch it again")
        if both := {one.name for one in listing.train} & {one.name for one in listing.test}:
            count = f"{len(both)} image{'s' * (len(both) > 1)}"
            raise Altered(f"{files.folder}: its lists have {count} for training and for testing, {min(both)} first; fetch them again")
        return listing

    def choose_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that matter to this set, with their defaults. Raise ValueError for a wrong value."""
        if not isinstance(options.get("boxes", False), bool):
            raise ValueError(f"boxes is {options['boxes']!r}; it must be true (crop to the bounding boxes) or false (whole images)")
        if options.get("aircraft", "variant") not in ("variant", "family"):
            raise ValueError(f"aircraft is {options['aircraft']!r}; choose variant (100 classes) or family (70)")
        return {name: options.get(name, DEFAULTS[name]) for name in self.options}


def published_file(name: str, megabytes: float, md5: str | None, *urls: str) -> File:
    """Describe a published file of an object set.

    The checksums are the MD5s by which torchvision and other public loaders check these files; no SHA-256s were found. Sizes are
    rounded. A file without an address has to be put in place by hand.
    """
    return File(name, round(megabytes * 1e6), "", urls, None, md5)
