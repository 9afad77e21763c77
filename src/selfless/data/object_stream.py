"""The stream of table 2: the object sets in turn, a head each, at 224×224 with ImageNet's mean and standard deviation.

The paper takes its eight tasks from MAS, whose released code holds neither them nor lists of their images; so splits, crops and classes
here are not known to be theirs. Splits are the sets' official ones (a fixed fifth where there is none); images are whole, except for
VOC's persons; `boxes=True` crops birds, cars and aircraft to theirs. Training images are the centre crops that are prepared;
`augment="flip"` of a run mirrors them.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from selfless.data.holding import hold
from selfless.data.objects import Place, load, notes
from selfless.data.part import Part
from selfless.data.paths import MissingData, data_dir
from selfless.data.rng import stratified
from selfless.data.sources.objects.base import OBJECTS, object_set
from selfless.data.sources.objects.fitting import SHAPE
from selfless.data.sources.objects.preparing import Prepared
from selfless.data.streams import Stream, Task

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
    """A task a set. Without names: every set that is here, in the paper's order, and the stream's notes name those that are not. With
    names: these, in this order, and one that is not here is an error. `tasks` takes the first so many.
    """
    found, missing = _found(names, where, tasks, boxes=boxes, aircraft=aircraft)
    if not found:
        raise MissingData(
            f"none of the eight object sets is here; each belongs into its folder below {data_dir(where) / 'objects'} "
            f"({', '.join(OBJECTS)}): selfless data fetch objects"
        )
    if tasks is not None and not 1 <= tasks <= len(found):
        raise ValueError(f"{len(found)} object sets are here ({', '.join(found)}), so tasks must be from 1 to that, not {tasks}")
    made, said, start = [], [f"not here: {', '.join(missing)}"] if missing else [], 0
    for name, prepared in found.items():
        made.append(_task(name, prepared, start, held_out, seed))
        said += notes(OBJECTS[name], prepared)
        start += len(prepared.about["classes"])
    title = f"objects:{','.join(names)}" if names else "objects"
    return Stream(title, tuple(made), tuple(made), start, SHAPE, seed, tuple(said))


def _found(names: Sequence[str], where: Place, tasks: int | None, **options: Any) -> tuple[dict[str, Prepared], list[str]]:
    """The sets of a stream, prepared, and the names of those that are not here."""
    for name in names:
        object_set(name)
    if len(set(names)) < len(names):
        raise ValueError(f"objects:{','.join(names)} names a set twice; a task each, please")
    found, missing = {}, []
    for name in names or OBJECTS:
        try:
            found[name] = load(name, data_dir=where, **options)
        except MissingData:
            if names:
                raise
            missing.append(name)
        if tasks is not None and len(found) == tasks:
            break
    return found, missing


def contents(text: str, where: Place = None, *, tasks: int | None = None, boxes: bool = False, aircraft: str = "variant") -> str:
    """A digest of the images that the stream of that name would show, their labels and halves; empty where they are not here. What is
    here and not prepared yet is prepared for it."""
    try:
        found, _ = _found(parse(text), where, tasks, boxes=boxes, aircraft=aircraft)
    except MissingData:
        return ""
    return hashlib.sha256("".join(f"{name} {prepared.digest}\n" for name, prepared in found.items()).encode()).hexdigest() if found else ""


def _task(name: str, prepared: Prepared, start: int, held_out: float, seed: int) -> Task:
    labels, cut = prepared.labels(), prepared.cut
    kept, taken = stratified(labels[:cut], held_out, seed, f"held-out {name}")

    def part(half: str, rows: Any) -> Part:
        columns = torch.from_numpy(labels[:cut] if half == "train" else labels[cut:]) + start
        return Part(_mapped(prepared, half), columns, torch.as_tensor(rows), mean=MEAN, std=STD)

    classes = tuple(prepared.about["classes"])
    aside = part("train", taken) if held_out > 0 else None
    test = part("test", torch.arange(len(labels) - cut))
    return Task(name, classes, (range(start, start + len(classes)),), part("train", kept), test, aside)


def _mapped(prepared: Prepared, half: str) -> Tensor:
    """One half's images, on disk. While somebody holds them, the same tensor: five seeds share one copy, on a GPU too."""
    key = (str(prepared.folder), half)
    if (known := _MAPPED.get(key)) is None:
        images, cut = prepared.images(), prepared.cut
        known = torch.from_numpy(images[:cut] if half == "train" else images[cut:])
        _MAPPED[key] = known
    return hold(known)


def parse(text: str) -> tuple[str, ...]:
    """The names in `objects:flowers,birds`; none for `objects`."""
    _, colon, names = text.partition(":")
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    if colon and not found:
        raise ValueError(f"{text!r} names no set; write objects, or objects:{','.join(list(OBJECTS)[:2])} (known: {', '.join(OBJECTS)})")
    return found
