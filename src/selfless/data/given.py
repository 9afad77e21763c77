"""Streams that are passed to a run as objects. A run holds their name, `given:NAME:DIGEST`; the digest is that of the content.

So a run stays a value that can be written as JSON, and its key changes with the data. The object is found by its name while a run that was
created with it exists.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

from selfless.data.custom import from_datasets
from selfless.data.errors import MissingData
from selfless.data.part import Part
from selfless.data.tasks import Stream, Task, first_tasks, set_aside

PREFIX = "given:"
_GIVEN: WeakValueDictionary[str, Stream] = WeakValueDictionary()


def name_stream(stream: Any) -> tuple[str, Stream | None]:
    """Return (name, object) of a stream, of a list of tasks, or of a name; None if the object of a name is nowhere."""
    if isinstance(stream, str):
        return stream, _GIVEN.get(stream)
    if not isinstance(stream, Stream | Sequence):
        raise TypeError(f"stream is a {type(stream).__name__}; it must be a name, a Stream, or a list of tasks (train, test)")
    made = stream if isinstance(stream, Stream) else from_datasets(stream)
    name = f"{PREFIX}{re.sub(r'[^A-Za-z0-9._-]+', '-', made.name)}:{digest_stream(made)[:16]}"
    held = _GIVEN.get(name)
    if held is None or (held is not made and not _has_name(held, name)):
        held = _GIVEN[name] = made
    return name, held


def check_unchanged(name: str) -> None:
    """Raise ValueError if the content of a stream object has changed since it was named."""
    stream = _GIVEN.get(name)
    if stream is not None and not _has_name(stream, name):
        del _GIVEN[name]
        raise ValueError(f"the arrays of the stream {stream.name} have changed since the run was created; create the run again")


def _has_name(stream: Stream, name: str) -> bool:
    return name.endswith(digest_stream(stream)[:16])


def given_stream(name: str, *, tasks: int | None = None, seed: int = 0, held_out: float = 0.0) -> Stream:
    """Return the stream of that name as a run asks for it: its first tasks, with a held-out share. The seed draws that share only."""
    stream = _GIVEN.get(name)
    if stream is None:
        raise MissingData(f"{name} was passed as an object and is not in this process; pass it again: train(run, stream=…)")
    stream = stream if tasks is None or tasks == len(stream.tasks) else first_tasks(stream, tasks)
    return set_aside(stream, held_out, seed) if held_out > 0 else stream


def digest_stream(stream: Stream) -> str:
    """Return the SHA-256 of everything that training and evaluation read, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for piece in _content(stream):
        digest.update(piece)
    return digest.hexdigest()


def _content(stream: Stream) -> Iterator[Any]:
    """Yield the content of a stream as bytes and arrays."""
    yield _text(stream.outputs, stream.input_shape)
    joint = stream.tasks != stream.evaluate
    for task in (*stream.tasks, *(stream.evaluate if joint else ())):
        yield _text(task.name, task.classes, [[head.start, head.stop] for head in task.heads], str(task.group))
        for half in ("train", "test", "held_out"):
            yield from _content_of_half(task, half)


def _content_of_half(task: Task, half: str) -> Iterator[Any]:
    data = getattr(task, half)
    parts: tuple[Part, ...] = () if data is None else data.parts
    for part in parts:
        yield _text(half, len(part), str(part.images.dtype), part.mean, part.std, part.weights is not None)
        yield part.targets.numpy()
        if part.weights is not None:
            yield part.weights.contiguous().numpy()
        for chunk in part.chunks():
            yield chunk.contiguous().numpy()


def _text(*values: Any) -> bytes:
    return json.dumps(values).encode() + b"\n"
