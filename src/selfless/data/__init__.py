"""Data: published sets by name, a user's own data, and streams of tasks made from them.

    from selfless.data import stream

    five = stream("permuted-mnist", tasks=5, seed=0, held_out=0.1)
    part = five.tasks[1].train.resident("cpu")
    x, y = part.batch(torch.arange(200))

How to add a stream or a data source: see `named`. Bottom up:
    errors, paths, checksums, progress, rng, archives, images     helpers
    sources/                                                      one module per data set; sources/objects/: the eight of table 2
    verify, fetch, cache, objects, weights                        data sets, object sets and pretrained networks by name
    rotation, augment, part                                       images as tensors
    tasks, streams, custom, object_stream, given, named           streams of tasks; `named` is on top
    carrying                                                      a stream as files, for worker processes
    description                                                   what a trained network must know of its data
    traits                                                        facts about a stream by name, without loading it

Others import from `selfless.data` itself, not from its modules.
Imports files and workers. Imported by bench, cli, engine, experiments, runner, spec, testing and trained.
"""

from selfless.data.augment import Augment
from selfless.data.cache import holding, load, offer
from selfless.data.carrying import read_stream, write_stream
from selfless.data.custom import from_arrays, from_datasets, from_folders, from_npz
from selfless.data.description import DataDescription, TaskDescription, describe
from selfless.data.errors import Altered, DataError, MissingData
from selfless.data.fetch import fetch
from selfless.data.given import check_unchanged, name_stream
from selfless.data.named import stream, stream_names
from selfless.data.object_stream import objects_digest
from selfless.data.objects import fetch_objects, prepare_objects, prepared_objects, present_objects
from selfless.data.part import Joined, Part, Resident
from selfless.data.paths import cache_dir, data_dir, data_dirs, is_writable
from selfless.data.sources import CATALOGUE, Check, Entry, Source, find_entry, sources
from selfless.data.sources.objects import OBJECTS, ObjectSet
from selfless.data.sources.objects.checks import describe_reduction, verify_objects
from selfless.data.sources.objects.preparing import all_prepared
from selfless.data.streams import KINDS, blurred, grouped, permuted, rotated, split
from selfless.data.tasks import Stream, Task, joint
from selfless.data.verify import verify
from selfless.data.weights import checksum, find_pretrained, locate_weights

__all__ = [
    "CATALOGUE",
    "KINDS",
    "OBJECTS",
    "Altered",
    "Augment",
    "Check",
    "DataDescription",
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
    "TaskDescription",
    "all_prepared",
    "blurred",
    "cache_dir",
    "check_unchanged",
    "checksum",
    "data_dir",
    "data_dirs",
    "describe",
    "describe_reduction",
    "fetch",
    "fetch_objects",
    "find_entry",
    "find_pretrained",
    "from_arrays",
    "from_datasets",
    "from_folders",
    "from_npz",
    "grouped",
    "holding",
    "is_writable",
    "joint",
    "load",
    "locate_weights",
    "name_stream",
    "objects_digest",
    "offer",
    "permuted",
    "prepare_objects",
    "prepared_objects",
    "present_objects",
    "read_stream",
    "rotated",
    "sources",
    "split",
    "stream",
    "stream_names",
    "verify",
    "verify_objects",
    "write_stream",
]
