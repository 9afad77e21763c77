"""A stream as a folder of plain files, to carry it to worker processes: `stream.json`, and one .npy file for each tensor.

Workers map the files into memory, so that all of them share one copy. Nothing is pickled.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfless.data.part import Joined, Part
from selfless.data.tasks import Stream, Task

FILE = "stream.json"


def write_stream(stream: Stream, folder: Path) -> None:
    """Write a stream into a folder. A tensor that several parts share is written once."""
    numbers: dict[int, int] = {}

    def tensor(value: Tensor) -> dict[str, int]:
        if id(value) not in numbers:
            numbers[id(value)] = len(numbers)
            np.save(folder / f"{numbers[id(value)]}.npy", value.numpy())
        return {"tensor": numbers[id(value)]}

    def data(value: Part | Joined | None) -> dict[str, Any] | None:
        if value is None:
            return None
        parts = [{f.name: getattr(part, f.name) for f in fields(Part)} for part in value.parts]
        plain = [{name: tensor(v) if isinstance(v, Tensor) else v for name, v in part.items()} for part in parts]
        return {"joined": isinstance(value, Joined), "parts": plain}

    def task(value: Task) -> dict[str, Any]:
        ranges = {name: None if (r := getattr(value, name)) is None else [r.start, r.stop] for name in ("group", "own")}
        halves = {half: data(getattr(value, half)) for half in ("train", "test", "held_out")}
        heads = [[head.start, head.stop] for head in value.heads]
        return {"name": value.name, "classes": value.classes, "heads": heads, **ranges, **halves}

    folder.mkdir(parents=True, exist_ok=True)
    about = {name: getattr(stream, name) for name in ("name", "outputs", "input_shape", "seed", "notes")}
    evaluate = None if stream.evaluate == stream.tasks else [task(one) for one in stream.evaluate]
    (folder / FILE).write_text(json.dumps(about | {"tasks": [task(one) for one in stream.tasks], "evaluate": evaluate}), encoding="utf-8")


def read_stream(folder: Path) -> Stream:
    """Read the stream of a folder that `write_stream` wrote; its tensors are mapped, not loaded."""
    about, tensors = json.loads((folder / FILE).read_text(encoding="utf-8")), dict[int, Tensor]()

    def tensor(number: int) -> Tensor:
        if number not in tensors:  # copy-on-write: nobody can change the file, and torch accepts the array as writable
            tensors[number] = torch.from_numpy(np.load(folder / f"{number}.npy", mmap_mode="c", allow_pickle=False))
        return tensors[number]

    def value(given: Any) -> Any:
        return tensor(given["tensor"]) if isinstance(given, dict) else tuple(given) if isinstance(given, list) else given

    def data(given: dict[str, Any] | None) -> Any:
        if given is None:
            return None
        parts = tuple(Part(**{name: value(v) for name, v in part.items()}) for part in given["parts"])
        return Joined(parts) if given["joined"] else parts[0]

    def task(given: dict[str, Any]) -> Task:
        group, own = (None if given[name] is None else range(*given[name]) for name in ("group", "own"))
        train, test, held_out = (data(given[half]) for half in ("train", "test", "held_out"))
        heads = tuple(range(*head) for head in given["heads"])
        return Task(given["name"], tuple(given["classes"]), heads, train, test, held_out, group, own)

    tasks = tuple(task(one) for one in about["tasks"])
    evaluate = tasks if about["evaluate"] is None else tuple(task(one) for one in about["evaluate"])
    return Stream(about["name"], tasks, evaluate, about["outputs"], tuple(about["input_shape"]), about["seed"], tuple(about["notes"]))
