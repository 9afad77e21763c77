"""Data sources: data sets on disk that can be found, read and checked. One module per set; the object sets are in `objects/`.

To add a published data set, write a module here: a subclass of `Entry` with `is_in`, `read` and `check`, and one instance with the
files, their checksums and addresses. Then add the instance to `CATALOGUE`. `selfless data fetch NAME`, `load("NAME")` and every kind
of stream (`split-NAME`) then work. `cifar.py` is a short example.

Imported by the rest of `data`. Imports only the helpers of `data`: errors, paths, checksums, progress, rng, archives, images.
"""

from __future__ import annotations

from selfless.data.sources.base import Check, Entry, File, Source, Wheel, per_channel, suggest
from selfless.data.sources.cifar import CIFAR_100
from selfless.data.sources.mnist import FASHION_MNIST, MNIST
from selfless.data.sources.tiny_imagenet import TINY_IMAGENET

__all__ = ["CATALOGUE", "Check", "Entry", "File", "Source", "Wheel", "find_entry", "per_channel", "sources", "suggest"]

CATALOGUE: dict[str, Entry] = {entry.name: entry for entry in (MNIST, FASHION_MNIST, CIFAR_100, TINY_IMAGENET)}


def sources() -> tuple[str, ...]:
    """Return the names of the published data sets, for `load` and `fetch`."""
    return tuple(CATALOGUE)


def find_entry(name: str) -> Entry:
    """Return the entry of that name. Raise ValueError with the nearest name and all names if there is none."""
    if name not in CATALOGUE:
        raise ValueError(f"no data set is called {name!r}{suggest(name, CATALOGUE)} (known: {', '.join(CATALOGUE)})")
    return CATALOGUE[name]
