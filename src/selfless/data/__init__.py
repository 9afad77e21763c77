"""Data: published sets by name, one's own, and streams of tasks made of them.

    from selfless.data import stream

    five = stream("permuted-mnist", tasks=5, seed=0, held_out=0.1)
    part = five.tasks[1].train.resident("cpu")
    x, y = part.batch(torch.arange(200))

Layers, bottom up: places (where files lie), checking, seeding, catalogue → archives, idx, cifar, images,
tiny_imagenet (formats) → verifying, fetching → source → part, augment → streams → own, folders, objects/ (table 2) → named.
"""

from selfless.data.augment import Augment
from selfless.data.cache import Source, load
from selfless.data.checksums import Altered
from selfless.data.custom import from_arrays, from_datasets, from_npz, grouped
from selfless.data.fetch import fetch
from selfless.data.named import stream, stream_names
from selfless.data.objects import fetch as fetch_objects
from selfless.data.objects import load as prepare_objects
from selfless.data.objects import verify as verify_objects
from selfless.data.part import Joined, Part, Resident
from selfless.data.paths import DataError, MissingData, cache_dir, data_dir
from selfless.data.sources.base import CATALOGUE, Entry, sources
from selfless.data.sources.folders import from_folders
from selfless.data.sources.objects.base import OBJECTS, ObjectSet
from selfless.data.streams import Stream, Task, blurred, joint, permuted, rotated, split
from selfless.data.verify import Check, verify

__all__ = [
    "CATALOGUE",
    "OBJECTS",
    "Altered",
    "Augment",
    "Check",
    "DataError",
    "Entry",
    "Joined",
    "MissingData",
    "ObjectSet",
    "Part",
    "Resident",
    "Source",
    "Stream",
    "Task",
    "blurred",
    "cache_dir",
    "data_dir",
    "fetch",
    "fetch_objects",
    "from_arrays",
    "from_datasets",
    "from_folders",
    "from_npz",
    "grouped",
    "joint",
    "load",
    "permuted",
    "prepare_objects",
    "rotated",
    "sources",
    "split",
    "stream",
    "stream_names",
    "verify",
    "verify_objects",
]
