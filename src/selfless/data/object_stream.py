"""The stream of table 2: the object sets as tasks, one head each, at 224×224 with ImageNet's mean and standard deviation.

The paper takes its eight tasks from MAS, whose released code contains neither the images nor lists of them. So it is not known whether
our splits, crops and classes are the same. Splits are the official ones (a fixed fifth where there is none). Images are whole, except for
VOC's persons; `boxes=True` crops birds, cars and aircraft to their boxes. Training images are the prepared centre crops;
`augment="flip"` of a run mirrors them.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from selfless.data.cache import hold
from selfless.data.errors import MissingData
from selfless.data.objects import prepare_objects
from selfless.data.part import Part
from selfless.data.paths import Place, data_dir
from selfless.data.rng import split_by_class
from selfless.data.sources.objects import OBJECTS, find_object_set
from selfless.data.sources.objects.base import FOLDER
from selfless.data.sources.objects.checks import notes_of
from selfless.data.sources.objects.fitting import SHAPE
from selfless.data.sources.objects.preparing import Prepared
from selfless.data.tasks import Stream, Task

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MAPPED: weakref.WeakValueDictionary[tuple[str, str], Tensor] = weakref.WeakValueDictionary()


def objects_stream(
    names: Sequence[str] = (),
    where: Place = None,
    *,
    tasks: int | None = None,
    seed: int = 0,
    held_out: float = 0.0,
    boxes: bool = False,
    aircraft: str = "variant",
) -> Stream:
    """Make one task per object set; `tasks` takes the first ones.

    With names: these sets in this order; a missing set is an error. Without names: every set on this machine, in the paper's order; the
    notes of the stream name the missing ones.
    """
    found, missing = _prepare_sets(names, where, tasks, boxes=boxes, aircraft=aircraft)
    if not found:
        raise MissingData(
            f"none of the eight object sets is on this machine; each belongs in its folder below {data_dir(where) / FOLDER} "
            f"({', '.join(OBJECTS)}): selfless data fetch objects"
        )
    if tasks is not None and not 1 <= tasks <= len(found):
        raise ValueError(f"{len(found)} object sets are here ({', '.join(found)}), so tasks must be from 1 to {len(found)}, not {tasks}")
    made, notes, start = [], [f"not here: {', '.join(missing)}"] if missing else [], 0
    for name, prepared in found.items():
        made.append(_make_task(name, prepared, start, held_out, seed))
        notes += notes_of(OBJECTS[name], prepared)
        start += len(prepared.about["classes"])
    title = f"objects:{','.join(names)}" if names else "objects"
    return Stream(title, tuple(made), tuple(made), start, SHAPE, seed, tuple(notes))


def objects_digest(text: str, where: Place = None, *, tasks: int | None = None, boxes: bool = False, aircraft: str = "variant") -> str:
    """Return a hash of the images, labels and halves of the stream of that name; "" if its sets are missing.

    Sets that are here and not prepared yet are prepared first.
    """
    try:
        found, _ = _prepare_sets(parse_names(text), where, tasks, boxes=boxes, aircraft=aircraft)
    except MissingData:
        return ""
    return hashlib.sha256("".join(f"{name} {prepared.digest}\n" for name, prepared in found.items()).encode()).hexdigest() if found else ""


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names in `objects:flowers,birds`; none for `objects`."""
    _, colon, names = text.partition(":")
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    if colon and not found:
        raise ValueError(f"{text!r} names no set; write objects, or objects:{','.join(list(OBJECTS)[:2])} (known: {', '.join(OBJECTS)})")
    return found


def _prepare_sets(names: Sequence[str], where: Place, tasks: int | None, **options: Any) -> tuple[dict[str, Prepared], list[str]]:
    """Return the prepared sets of a stream, and the names of the missing ones."""
    for name in names:
        find_object_set(name)
    if len(set(names)) < len(names):
        raise ValueError(f"objects:{','.join(names)} names a set twice; each set can be one task only")
    found, missing = {}, []
    for name in names or OBJECTS:
        try:
            found[name] = prepare_objects(name, data_dir=where, **options)
        except MissingData:
            if names:
                raise
            missing.append(name)
        if tasks is not None and len(found) == tasks:
            break
    return found, missing


def _make_task(name: str, prepared: Prepared, start: int, held_out: float, seed: int) -> Task:
    labels, cut = prepared.labels(), prepared.cut
    kept, taken = split_by_class(labels[:cut], held_out, seed, f"held-out {name}")

    def part(half: str, rows: Any) -> Part:
        columns = torch.from_numpy(labels[:cut] if half == "train" else labels[cut:]) + start
        return Part(_map_images(prepared, half), columns, torch.as_tensor(rows), mean=MEAN, std=STD)

    classes = tuple(prepared.about["classes"])
    aside = part("train", taken) if held_out > 0 else None
    test = part("test", torch.arange(len(labels) - cut))
    return Task(name, classes, (range(start, start + len(classes)),), part("train", kept), test, aside)


def _map_images(prepared: Prepared, half: str) -> Tensor:
    """Return the images of one half, mapped from disk. While they are in use, the same tensor: five seeds share one copy."""
    key = (str(prepared.folder), half)
    if (known := _MAPPED.get(key)) is None:
        images, cut = prepared.images(), prepared.cut
        known = torch.from_numpy(images[:cut] if half == "train" else images[cut:])
        _MAPPED[key] = known
    return hold(known)
