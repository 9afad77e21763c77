"""Streams as objects: their names, their digests, and what a run asks of them."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch

from selfless.data import MissingData, Stream, from_arrays, joint, name_stream, stream
from selfless.data.given import check_unchanged, digest_stream
from selfless.data.tasks import first_tasks


def arrays(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.Generator(np.random.PCG64(seed)).integers(0, 256, (60, 4, 4)).astype(np.uint8)
    return x, np.arange(60) % 6


def make(**options: object) -> Stream:
    x, y = arrays()
    return from_arrays(x, y, x[:30], y[:30], task=y // 2, **options)  # type: ignore[arg-type]


def test_the_digest_follows_the_content_and_nothing_else() -> None:
    assert digest_stream(make()) == digest_stream(make())
    assert digest_stream(make()) == digest_stream(make(seed=3)), "the seed of a stream without random choices is no content"
    x, y = arrays()
    wide = np.zeros((60, 8, 4), np.uint8)
    wide[:, ::2] = x  # the same numbers, laid out in another way
    assert digest_stream(from_arrays(wide[:, ::2], y, x[:30], y[:30], task=y // 2)) == digest_stream(make())


def _one_pixel() -> Stream:
    x, y = arrays()
    x[7, 1, 2] ^= 1
    return from_arrays(x, y, arrays()[0][:30], y[:30], task=y // 2)


CHANGES: dict[str, Callable[[], Stream]] = {
    "a pixel": _one_pixel,
    "names of classes": lambda: make(classes=list("abcdef")),
    "names of tasks": lambda: make(names=["a", "b", "c"]),
    "normalisation": lambda: make(mean=[0.5], std=[0.5]),
    "heads": lambda: make(head="shared"),
    "a held-out set": lambda: make(held_out=0.2),
    "fewer tasks": lambda: first_tasks(make(), 2),
    "joint": lambda: joint(make()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_the_content_changes_the_digest(change: str) -> None:
    assert digest_stream(CHANGES[change]()) != digest_stream(make())


def test_a_stream_is_found_by_its_name_while_it_is_held() -> None:
    made = make()
    name, held = name_stream(made)
    assert name.startswith("given:arrays:")
    assert held is made
    assert name_stream(make())[0] == name, "equal content, equal name"
    assert stream(name) is made
    assert len(stream(f"joint-{name}").tasks) == 1
    del made, held
    gc.collect()
    with pytest.raises(MissingData, match="pass it again"):
        stream(name)


def test_a_run_takes_the_first_tasks_and_a_held_out_share() -> None:
    made = make()
    name, _ = name_stream(made)
    two = stream(name, tasks=2)
    assert (len(two.tasks), two.outputs) == (2, 4)
    assert two.tasks[0] is made.tasks[0], "members of a fleet share one copy of the data"
    with pytest.raises(ValueError, match="tasks must be from 1 to 3, not 4"):
        stream(name, tasks=4)
    with pytest.raises(ValueError, match="no option 'classes_per_task'"):
        stream(name, classes_per_task=2)
    aside = stream(name, held_out=0.2, seed=1)
    for task, whole in zip(aside.tasks, made.tasks, strict=True):
        assert task.held_out is not None
        rows = torch.cat([task.train.rows, task.held_out.rows])  # type: ignore[union-attr]
        assert rows.sort().values.equal(whole.train.rows.sort().values)  # type: ignore[union-attr]
        assert task.held_out.targets.bincount()[-2:].tolist() == [2, 2], "of every class"
    assert not torch.equal(aside.tasks[0].held_out.rows, stream(name, held_out=0.2, seed=2).tasks[0].held_out.rows)  # type: ignore[union-attr]
    own = make(held_out=0.5)
    assert stream(name_stream(own)[0], held_out=0.2) is own, "a held-out set of the stream stays"
    with pytest.raises(ValueError, match="mixes tasks"):
        stream(name_stream(upper := joint(made))[0], held_out=0.2)
    del upper


def test_arrays_that_changed_are_noticed() -> None:
    x, y = arrays()
    made = from_arrays(x, y, x[:30], y[:30], task=y // 2)
    name, _ = name_stream(made)
    check_unchanged(name)
    x[3] = 0
    with pytest.raises(ValueError, match="have changed since the run was created"):
        check_unchanged(name)
    assert name_stream(made)[0] != name
