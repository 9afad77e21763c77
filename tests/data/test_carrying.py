"""A stream that is written and read again is the same stream, whatever it is made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from selfless.data import Stream, describe, from_arrays, joint, read_stream, write_stream
from selfless.data.given import digest_stream


def make(kind: str) -> Stream:
    x, y = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (60, 4, 4)).astype(np.uint8), np.arange(60) % 6
    if kind in ("grouped", "joint"):
        made = from_arrays(x, y, x[:30], y[:30], task=y // 2, held_out=0.2, mean=[0.5], std=[0.2])
        return joint(made) if kind == "joint" else made
    options = {"tasks": 3} if kind in ("permuted", "rotated") else {"classes_per_task": 2}
    return from_arrays(x, y, x[:30], y[:30], kind=kind, **options)


@pytest.mark.parametrize("kind", ["grouped", "joint", "permuted", "rotated", "split", "blurred"])
def test_a_stream_survives_the_files(kind: str, tmp_path: Path) -> None:
    made = make(kind)
    write_stream(made, tmp_path)
    again = read_stream(tmp_path)
    assert digest_stream(again) == digest_stream(made)
    assert describe(again) == describe(made)
    assert (again.name, again.seed, again.notes) == (made.name, made.seed, made.notes)
    shared = {id(part.images) for task in again.tasks for part in task.train.parts}
    assert len(shared) == 1, "tasks share one tensor, as before"
