"""Data: published sets by name, one's own, and streams of tasks made of them.

    from selfless.data import stream

    five = stream("permuted-mnist", tasks=5, seed=0, held_out=0.1)
    part = five.tasks[1].train.resident("cpu")
    x, y = part.batch(torch.arange(200))

Layers, bottom up: places (where files lie), checking, seeding, catalogue → archives, idx, cifar, images,
tiny_imagenet (formats) → verifying, fetching → source → part, augment → streams → own, folders, objects/ (table 2) → named.
"""

from selfless.data.augment import Augment
from selfless.data.catalogue import CATALOGUE, Entry, sources
from selfless.data.checking import Altered
from selfless.data.fetching import fetch
from selfless.data.folders import from_folders
from selfless.data.named import stream, stream_names
from selfless.data.objects.finding import fetch as fetch_objects
from selfless.data.objects.finding import load as prepare_objects
from selfless.data.objects.finding import verify as verify_objects
from selfless.data.objects.published import OBJECTS, ObjectSet
from selfless.data.own import from_arrays, from_datasets, from_npz, grouped
from selfless.data.part import Joined, Part, Resident
from selfless.data.places import DataError, MissingData, cache_dir, data_dir
from selfless.data.source import Source, load
from selfless.data.streams import Stream, Task, blurred, joint, permuted, rotated, split
from selfless.data.verifying import Check, verify

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
