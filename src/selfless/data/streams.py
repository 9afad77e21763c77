"""Streams of tasks over a data set: permuted, rotated, split, blurred, and joint (the upper bound).

A network has one output layer; a head is a range of its columns, and a label is a column. Every choice depends on
(seed, what it is for, task number) alone, so the first three tasks of five are the three tasks of three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from selfless.data.cache import Source
from selfless.data.part import Joined, Part
from selfless.data.rng import ordering, stratified, uniform


@dataclass(frozen=True, eq=False)
class Task:
    """One task. `heads`: the output columns that are trained (several only for `joint` over tasks with own heads);
    `classes`: their names, in the order of the columns. `group`: the columns of the classes the task is about, where
    the head is wider than that (`blurred`, `head="all"`): accuracy can be judged within them, or against all.
    """

    name: str
    classes: tuple[str, ...]
    heads: tuple[range, ...]
    train: Part | Joined
    test: Part | Joined
    held_out: Part | Joined | None = None
    group: range | None = None


@dataclass(frozen=True, eq=False)
class Stream:
    """Tasks in order. `evaluate`: the tasks accuracy is measured on, which are `tasks` except for joint training.
    `notes`: what every table and result must say (that a data set is reduced, for one).
    """

    name: str
    tasks: tuple[Task, ...]
    evaluate: tuple[Task, ...]
    outputs: int
    input_shape: tuple[int, int, int]
    seed: int = 0
    notes: tuple[str, ...] = ()
    source: Source | None = None  # held so that streams of several seeds share one copy


@dataclass(frozen=True)
class _Pool:
    """A source's two halves with the rows that are trained on, held out and tested on, and labels as columns."""

    train: Part
    held_out: Part | None
    test: Part

    def of(self, columns: range | None = None, **change: object) -> tuple[Part, Part | None, Part]:
        """The three parts, limited to the rows whose label is in `columns`, with fields changed."""

        def view(part: Part) -> Part:
            rows = part.rows
            if columns is not None:
                label = part.labels[rows]
                rows = rows[(label >= columns.start) & (label < columns.stop)]
            return replace(part, rows=rows, **change)  # type: ignore[arg-type]

        return view(self.train), None if self.held_out is None else view(self.held_out), view(self.test)


def _pool(source: Source, held_out: float, seed: int, columns: Tensor | None = None) -> _Pool:
    """`columns` (classes,) maps a class to its output column, −1 for classes that are left out."""
    kept, taken = stratified(source.train[1].numpy(), held_out, seed, "held-out")

    def part(half: tuple[Tensor, Tensor], rows: Tensor) -> Part:
        labels = half[1] if columns is None else columns[half[1]]
        return Part(half[0], labels, rows[labels[rows] >= 0], mean=source.mean, std=source.std)

    test = part(source.test, torch.arange(len(source.test[1])))
    aside = part(source.train, torch.from_numpy(taken)) if held_out > 0 else None
    return _Pool(part(source.train, torch.from_numpy(kept)), aside, test)


def permuted(source: Source, *, tasks: int = 5, seed: int = 0, held_out: float = 0.0) -> Stream:
    """Every task is the whole data set, its pixels in another order; the first as it is. One shared head."""
    pool, head, made = _pool(source, held_out, seed), range(len(source.classes)), []
    for t in range(_at_least_one(tasks)):
        order = None if t == 0 else torch.from_numpy(ordering(int(np.prod(source.shape)), seed, "permutation", t))
        train, aside, test = pool.of(pixels=order)
        made.append(Task(f"permutation {t + 1}", source.classes, (head,), train, test, aside))
    return _stream(f"permuted-{source.name}", made, len(head), source, seed)


def rotated(
    source: Source,
    *,
    tasks: int = 5,
    seed: int = 0,
    held_out: float = 0.0,
    angles: Sequence[float] | None = None,
    max_angle: float = 180.0,
) -> Stream:
    """Every task is the whole data set, turned by another angle: those given, else 0° and then seeded ones below
    `max_angle`. One shared head.
    """
    pool, head, made = _pool(source, held_out, seed), range(len(source.classes)), []
    tasks = _at_least_one(len(angles) if angles is not None else tasks)
    turns = angles or [0.0, *(round(max_angle * float(u), 2) for u in uniform(max(tasks, 64), seed, "angle"))][:tasks]
    for turn in turns:
        train, aside, test = pool.of(angle=float(turn))
        made.append(Task(f"rotation {float(turn):g}°", source.classes, (head,), train, test, aside))
    return _stream(f"rotated-{source.name}", made, len(head), source, seed)


def split(
    source: Source,
    *,
    tasks: int | None = None,
    classes_per_task: int | None = None,
    class_order: Sequence[int | str] | str | None = None,
    head: str = "own",
    seed: int = 0,
    held_out: float = 0.0,
) -> Stream:
    """Every task is a few classes of their own. `head="own"`: a new head each; `"all"`: one head over all classes.

    The order of classes is shuffled by the seed, or `class_order="natural"`, or given (names or numbers; those left
    out are not used). `tasks` takes the first so many of the standard split; `classes_per_task` changes the split.
    """
    if head not in ("own", "all"):
        raise ValueError(f"head must be 'own' (a new head per task) or 'all' (one over all classes), not {head!r}")
    order, step, tasks = _layout(source, tasks, classes_per_task, class_order, seed)
    used = tasks * step
    pool, made = _pool(source, held_out, seed, _columns(source, order[:used])), []
    for t in range(tasks):
        group = range(t * step, (t + 1) * step)
        train, aside, test = pool.of(group)
        own = group if head == "own" else range(used)
        names = tuple(source.classes[order[c]] for c in own)
        made.append(Task(f"split {t + 1}", names, (own,), train, test, aside, None if head == "own" else group))
    return _stream(f"split-{source.name}", made, used, source, seed)


def blurred(
    source: Source,
    *,
    tasks: int | None = None,
    classes_per_task: int | None = None,
    class_order: Sequence[int | str] | str | None = None,
    p: float = 2 / 3,
    seed: int = 0,
    held_out: float = 0.0,
) -> Stream:
    """No hard boundaries: groups of classes in turn, the current one drawn with probability p and all the others
    with 1 − p. One head over all classes; the test (and held-out) images of a task are its group's.
    """
    if not 0 < p <= 1:
        raise ValueError(f"p, the share of the current group, must be in (0, 1], not {p}")
    order, step, tasks = _layout(source, tasks, classes_per_task, class_order, seed)
    pool, head = _pool(source, held_out, seed, _columns(source, order)), range(len(order))
    names, made = tuple(source.classes[c] for c in order), []
    columns = pool.train.labels[pool.train.rows]
    for t in range(tasks):
        group = range(t * step, (t + 1) * step)
        inside = (columns >= group.start) & (columns < group.stop)
        count = int(inside.sum())
        weights = torch.where(inside, p / max(count, 1), (1 - p) / max(len(columns) - count, 1)).float()
        _, aside, test = pool.of(group)
        train = replace(pool.train, weights=weights)
        made.append(Task(f"group {t + 1}", names, (head,), train, test, aside, group))
    return _stream(f"blurred-{source.name}", made, len(head), source, seed)


def joint(stream: Stream) -> Stream:
    """The upper bound: one task that holds the training data of all of them, evaluated on each of them."""
    heads = tuple(dict.fromkeys(head for task in stream.tasks for head in task.heads))
    named = {task.heads[0]: task.classes for task in stream.tasks}
    classes = tuple(name for head in heads for name in named[head])
    if any(task.train.weights is not None for task in stream.tasks):  # blurred: every task holds every row already
        whole = stream.tasks[0].train.parts[0]
        train: Part | Joined = replace(whole, weights=None)
    else:
        train = Joined(tuple(p for task in stream.tasks for p in task.train.parts))
    asides = tuple(p for task in stream.tasks if task.held_out is not None for p in task.held_out.parts)
    test = Joined(tuple(p for task in stream.tasks for p in task.test.parts))
    task = Task("joint", classes, heads, train, test, Joined(asides) if asides else None)
    return replace(stream, name=f"joint-{stream.name}", tasks=(task,), evaluate=stream.tasks)


def limited(stream: Stream, n: int) -> Stream:
    """The same tasks with at most n images in each part, evenly spaced: a small version that still holds every class."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"limit is {n!r}; it must be a whole number ≥ 1: how many images of each task to keep")

    def some(part: Part) -> Part:
        at = torch.arange(min(n, len(part))) * len(part) // min(n, len(part))
        return replace(part, rows=part.rows[at], weights=None if part.weights is None else part.weights[at])

    def cut(part: Part | Joined) -> Part | Joined:
        return some(part) if isinstance(part, Part) else Joined(tuple(some(one) for one in part.parts))

    tasks = tuple(
        replace(t, train=cut(t.train), test=cut(t.test), held_out=None if t.held_out is None else cut(t.held_out)) for t in stream.tasks
    )
    return replace(stream, tasks=tasks, evaluate=tasks, notes=(*stream.notes, f"limited to {n} images of each task"))


def _stream(name: str, tasks: list[Task], outputs: int, source: Source, seed: int) -> Stream:
    made = tuple(tasks)
    return Stream(name, made, made, outputs, source.shape, seed, source.notes, source)


def _at_least_one(tasks: int) -> int:
    if tasks < 1:
        raise ValueError(f"a stream has at least one task, not {tasks}")
    return tasks


def class_numbers(source: Source, order: Sequence[int | str] | str | None, seed: int) -> list[int]:
    """The classes in the order their columns get: seeded, "natural", or as given by name or number."""
    if order is None:
        return [int(c) for c in ordering(len(source.classes), seed, "class order")]
    if isinstance(order, str):
        if order != "natural":
            raise ValueError(f"class_order must be 'natural' or a list of classes, not {order!r}")
        return list(range(len(source.classes)))
    by_name = {name: i for i, name in enumerate(source.classes)}
    numbers = [by_name.get(c, -1) if isinstance(c, str) else int(c) for c in order]
    for given, number in zip(order, numbers, strict=True):
        if not 0 <= number < len(source.classes) or numbers.count(number) > 1:
            raise ValueError(f"class_order: {given!r} is not a class of {source.name}, or is there twice")
    return numbers


def _layout(
    source: Source,
    tasks: int | None,
    step: int | None,
    class_order: Sequence[int | str] | str | None,
    seed: int,
) -> tuple[list[int], int, int]:
    """(class order, classes per task, tasks), checked to fit."""
    order = class_numbers(source, class_order, seed)
    step = step or source.classes_per_task or (len(order) // tasks if tasks and len(order) % tasks == 0 else None)
    if step is None:
        raise ValueError(f"say classes_per_task= for {source.name}: its {len(order)} classes must be split somehow")
    most = len(order) // step
    if step < 1 or most < 1 or (tasks is not None and tasks > most):
        raise ValueError(
            f"{source.name} has {len(order)} classes: at most {most} tasks of {step}, not {tasks or 1}; change classes_per_task"
        )
    return order, step, _at_least_one(most if tasks is None else tasks)


def _columns(source: Source, order: list[int]) -> Tensor:
    columns = torch.full((len(source.classes),), -1, dtype=torch.int64)
    columns[torch.tensor(order)] = torch.arange(len(order))
    return columns
