"""Tasks and streams of tasks as values, and changes of a whole stream: `joint`, `limit_images`, `first_tasks` and `set_aside`.

A network has one output layer. A head is a range of its columns, and a label is a column.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from selfless.data.part import Joined, Part
from selfless.data.rng import split_by_class
from selfless.data.sources.base import Source


@dataclass(frozen=True, eq=False)
class Task:
    """One task.

    heads     the output columns that are trained; more than one range only for `joint` over tasks that have their own heads
    classes   the names of these columns, in order
    group     the columns of the task's own classes if the head is wider (`blurred`, `head="all"`): accuracy can be measured
              among them or among all
    own       the columns of the task's own classes if it is always evaluated among more (the class scenario)
    """

    name: str
    classes: tuple[str, ...]
    heads: tuple[range, ...]
    train: Part | Joined
    test: Part | Joined
    held_out: Part | Joined | None = None
    group: range | None = None
    own: range | None = None

    @property
    def names(self) -> dict[int, str]:
        """The class name of every output column of this task."""
        return dict(zip((column for head in self.heads for column in head), self.classes, strict=True))

    @property
    def columns(self) -> range:
        """The output columns for classifying this task: those of its group if it has one, else those of its head."""
        return self.group if self.group is not None else range(self.heads[0].start, self.heads[-1].stop)


@dataclass(frozen=True, eq=False, repr=False)
class Stream:
    """Tasks in order.

    evaluate   the tasks on which accuracy is measured; the same as `tasks`, except in joint training
    notes      remarks that every table and result repeats, such as that a data set is reduced
    source     the data set; kept here so that streams of several seeds share one copy of it
    learned    how many tasks a network has learned before this stream, in a run that is continued; they come first in `evaluate`
    """

    name: str
    tasks: tuple[Task, ...]
    evaluate: tuple[Task, ...]
    outputs: int
    input_shape: tuple[int, int, int]
    seed: int = 0
    notes: tuple[str, ...] = ()
    source: Source | None = None
    learned: int = 0

    def __repr__(self) -> str:
        tasks = ", ".join(f"{task.name}: {len(task.train)} + {len(task.test)}" for task in self.tasks[:5])
        more = f", … {len(self.tasks) - 5} more" if len(self.tasks) > 5 else ""
        shape = "×".join(map(str, self.input_shape))
        many = f"{len(self.tasks)} task{'s' * (len(self.tasks) != 1)}"
        return f"Stream({self.name!r}, {many} (training + test images: {tasks}{more}), {self.outputs} outputs, {shape})"

    @property
    def is_joint(self) -> bool:
        """True if one task is the training data of all tasks."""
        return self.learned + len(self.tasks) < len(self.evaluate)

    @property
    def heads(self) -> list[tuple[range, ...]]:
        """The output columns of every task that a network learns, those it has learned before included."""
        return [task.heads for task in (*self.evaluate[: self.learned], *self.tasks)]


def joint(stream: Stream) -> Stream:
    """Return the upper bound: one task with the training data of all tasks, evaluated on each of them."""
    heads = tuple(dict.fromkeys(head for task in stream.tasks for head in task.heads))
    named = {task.heads[0]: task.classes for task in stream.tasks}
    classes = tuple(name for head in heads for name in named[head])
    if any(task.train.weights is not None for task in stream.tasks):  # blurred: every task holds every row already
        whole = stream.tasks[0].train.parts[0]
        train: Part | Joined = replace(whole, weights=None)
    else:
        train = Joined(tuple(p for task in stream.tasks for p in task.train.parts))
    held_out = tuple(p for task in stream.tasks if task.held_out is not None for p in task.held_out.parts)
    test = Joined(tuple(p for task in stream.tasks for p in task.test.parts))
    task = Task("joint", classes, heads, train, test, Joined(held_out) if held_out else None)
    return replace(stream, name=f"joint-{stream.name}", tasks=(task,), evaluate=stream.tasks)


def limit_images(stream: Stream, n: int) -> Stream:
    """Keep at most n images of each part of each task, evenly spaced, so that every class is still present."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"limit is {n!r}; it must be a whole number ≥ 1: how many images of each task to keep")

    def limit_part(part: Part) -> Part:
        at = torch.arange(min(n, len(part))) * len(part) // min(n, len(part))
        return replace(part, rows=part.rows[at], weights=None if part.weights is None else part.weights[at])

    def limit(part: Part | Joined) -> Part | Joined:
        return limit_part(part) if isinstance(part, Part) else Joined(tuple(limit_part(one) for one in part.parts))

    tasks = tuple(
        replace(t, train=limit(t.train), test=limit(t.test), held_out=None if t.held_out is None else limit(t.held_out))
        for t in stream.tasks
    )
    return replace(stream, tasks=tasks, evaluate=tasks, notes=(*stream.notes, f"limited to {n} images of each task"))


def first_tasks(stream: Stream, n: int) -> Stream:
    """Return the stream of the first n tasks, with the outputs that they need."""
    _check_plain(stream, "only its first tasks")
    if not 1 <= n <= len(stream.tasks):
        raise ValueError(f"{stream.name} has {len(stream.tasks)} tasks, so tasks must be from 1 to {len(stream.tasks)}, not {n}")
    tasks = stream.tasks[:n]
    return replace(stream, tasks=tasks, evaluate=tasks, outputs=max(head.stop for task in tasks for head in task.heads))


def set_aside(stream: Stream, share: float, seed: int) -> Stream:
    """Return the stream with a share of the training data of each class held out. Held-out sets that it has already stay."""
    if all(task.held_out is not None for task in stream.evaluate):
        return stream
    _check_plain(stream, "a held-out share")

    def divide(task: Task, t: int) -> Task:
        part = task.train.parts[0]
        kept, taken = split_by_class(part.targets.numpy(), share, seed, f"held-out {t}")
        return replace(task, train=replace(part, rows=part.rows[kept]), held_out=replace(part, rows=part.rows[taken]))

    tasks = tuple(divide(task, t) for t, task in enumerate(stream.tasks))
    return replace(stream, tasks=tasks, evaluate=tasks)


def _check_plain(stream: Stream, wanted: str) -> None:
    """Raise ValueError for joint and blurred streams, whose tasks overlap."""
    plain = len(stream.tasks) == len(stream.evaluate) and all(isinstance(t.train, Part) and t.train.weights is None for t in stream.tasks)
    if not plain:
        raise ValueError(f"{stream.name} mixes tasks, so a run cannot take {wanted} of it; say so where the stream is made")
