"""Laws of streams: what tasks share, what they do not, and that the seed decides everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from selfless.data import Joined, Part, Source, blurred, joint, permuted, rotated, split
from selfless.data.tasks import limit_images


def source(classes: int = 10, per_class: int = 6, shape: tuple[int, int, int] = (1, 4, 4)) -> Source:
    """Image i is filled with i, so that rows can be told apart."""
    n = classes * per_class
    images = torch.arange(n, dtype=torch.uint8)[:, None, None, None].expand(n, *shape).contiguous()
    labels = torch.arange(n) % classes
    names = tuple(f"c{i}" for i in range(classes))
    half = n // 2
    return Source("toy", (images, labels), (images[:half], labels[:half]), names, classes_per_task=2)


def test_choices_do_not_touch_global_randomness() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    permuted(source(), tasks=3, held_out=0.2)
    split(source())
    assert torch.equal(before, torch.get_rng_state())


def test_permuted() -> None:
    made = permuted(source(), tasks=4, seed=7)
    assert [len(t.train) for t in made.tasks] == [60] * 4
    assert all(t.heads == (range(10),) for t in made.tasks)
    assert made.outputs == 10
    assert made.tasks[0].train.pixels is None, "the first task is the identity"
    for task in made.tasks[1:]:
        assert sorted(task.train.pixels.tolist()) == list(range(16))
        assert torch.equal(task.train.pixels, task.test.pixels)
    assert not torch.equal(made.tasks[1].train.pixels, made.tasks[2].train.pixels)
    assert len({t.train.images.data_ptr() for t in made.tasks}) == 1, "images are shared"
    assert made.evaluate == made.tasks


@pytest.mark.parametrize("make", [permuted, rotated, split, blurred])
def test_same_seed_same_stream_and_fewer_tasks_are_the_first_ones(make: Callable[..., object]) -> None:
    def look(tasks: int, seed: int) -> list[object]:
        made = make(source(), tasks=tasks, seed=seed, held_out=0.2)
        return [
            (
                t.name,
                t.classes[:2],
                t.train.rows.tolist(),
                t.held_out.rows.tolist(),
                t.train.angle,
                None if t.train.pixels is None else t.train.pixels.tolist(),
            )
            for t in made.tasks
        ]

    assert look(4, 5) == look(4, 5)
    assert look(4, 5)[:2] == look(2, 5)
    assert look(4, 5) != look(4, 6)


def test_split_partitions_the_data() -> None:
    made = split(source(), seed=3)
    assert len(made.tasks) == 5
    assert made.outputs == 10
    rows = torch.cat([t.train.rows for t in made.tasks])
    assert sorted(rows.tolist()) == list(range(60))
    assert sorted(name for t in made.tasks for name in t.classes) == [f"c{i}" for i in range(10)]
    for t, task in enumerate(made.tasks):
        assert task.heads == (range(2 * t, 2 * t + 2),)
        for part in (task.train, task.test):
            assert set(part.targets.tolist()) == set(task.heads[0])
            for row, column in zip(part.rows.tolist(), part.targets.tolist(), strict=True):
                assert task.classes[column - 2 * t] == f"c{row % 10}", "a column's name is the class of its images"


def test_class_order_given() -> None:
    made = split(source(), class_order=[9, 8, "c0", "c1"], classes_per_task=2)
    assert [t.classes for t in made.tasks] == [("c9", "c8"), ("c0", "c1")]
    assert made.outputs == 4
    assert split(source(), class_order="natural").tasks[0].classes == ("c0", "c1")
    wide = split(source(), class_order="natural", head="all")
    assert wide.tasks[1].heads == (range(10),)
    assert wide.tasks[1].group == range(2, 4)
    for bad in ([0, 0], [10], ["x"], "sorted"):
        with pytest.raises(ValueError, match="class_order"):
            split(source(), class_order=bad)
    with pytest.raises(ValueError, match="at most 5 tasks of 2, not 6"):
        split(source(), tasks=6)
    with pytest.raises(ValueError, match="head must be"):
        split(source(), head="new")


def test_held_out_is_apart_and_split_by_class() -> None:
    for made in (permuted(source(), held_out=1 / 3), split(source(), held_out=1 / 3)):
        for task in made.tasks:
            assert task.held_out is not None
            kept, taken = set(task.train.rows.tolist()), set(task.held_out.rows.tolist())
            assert not kept & taken
            counts = task.held_out.targets.bincount()
            assert set(counts[counts > 0].tolist()) == {2}
    assert permuted(source()).tasks[0].held_out is None
    with pytest.raises(ValueError, match="share"):
        permuted(source(), held_out=1.0)


def test_blurred_draws_the_group_two_times_in_three() -> None:
    made = blurred(source(per_class=20), seed=1, held_out=0.1)
    assert len(made.tasks) == 5
    draw = torch.Generator().manual_seed(0)
    for task in made.tasks:
        assert task.heads == (range(10),)
        assert task.group is not None
        train = task.train
        assert isinstance(train, Part)
        assert train.weights is not None
        inside = (train.targets >= task.group.start) & (train.targets < task.group.stop)
        assert train.weights.sum().item() == pytest.approx(1)
        assert train.weights[inside].sum().item() == pytest.approx(2 / 3)
        drawn = torch.cat([train.order(draw) for _ in range(50)])
        assert inside[drawn].float().mean().item() == pytest.approx(2 / 3, abs=0.02)
        assert set(task.test.targets.tolist()) == set(task.group)
        assert set(task.held_out.targets.tolist()) == set(task.group)
    with pytest.raises(ValueError, match="share of the current group"):
        blurred(source(), p=0.0)


def test_limited_keeps_a_few_of_every_class_and_says_so() -> None:
    sorted_by_class = source(per_class=20)
    images, labels = sorted_by_class.train
    by_class = labels.argsort(stable=True)
    ordered = replace(sorted_by_class, train=(images[by_class], labels[by_class]))
    for make in (permuted, split, blurred):
        whole, few = make(ordered, tasks=2, held_out=0.2), limit_images(make(ordered, tasks=2, held_out=0.2), 10)
        assert "limited to 10 images" in few.notes[-1]
        assert few.evaluate is few.tasks
        for a, b in zip(whole.tasks, few.tasks, strict=True):
            for part in ("train", "test", "held_out"):
                assert len(getattr(b, part)) == min(10, len(getattr(a, part)))
            assert set(b.train.targets.tolist()) == set(a.train.targets.tolist())
            assert set(b.train.parts[0].rows.tolist()) <= set(a.train.parts[0].rows.tolist())
    assert len(joint(limit_images(permuted(ordered, tasks=3), 7)).tasks[0].train) == 21
    with pytest.raises(ValueError, match="how many images of each task"):
        limit_images(permuted(ordered), 0)


def test_joint_is_the_union() -> None:
    base = permuted(source(), tasks=3, held_out=0.2)
    made = joint(base)
    (task,) = made.tasks
    assert made.name == "joint-permuted-toy"
    assert made.evaluate == base.tasks
    assert task.heads == (range(10),)
    assert len(task.train) == sum(len(t.train) for t in base.tasks)
    assert isinstance(task.train, Joined)
    whole = task.train.resident()
    parts = [t.train.resident() for t in base.tasks]
    assert torch.equal(whole.x, torch.cat([p.x for p in parts]))
    assert torch.equal(whole.y, torch.cat([p.y for p in parts]))

    heads = joint(split(source(), class_order="natural")).tasks[0]
    assert heads.heads == tuple(range(i, i + 2) for i in range(0, 10, 2))
    assert heads.classes == tuple(f"c{i}" for i in range(10))
    blur = joint(blurred(source())).tasks[0]
    assert len(blur.train) == 60
    assert blur.train.weights is None


def test_rotated() -> None:
    made = rotated(source(), tasks=3, seed=2)
    assert made.tasks[0].train.angle == 0
    assert all(0 <= t.train.angle < 180 for t in made.tasks)
    assert [t.train.angle for t in rotated(source(), angles=[0, 30, 60]).tasks] == [0, 30, 60]
