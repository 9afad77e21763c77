"""The kinds of streams over a data set: permuted, rotated, split, blurred, and grouped (given tasks).

Every choice depends on (seed, purpose, task number) alone, so the first three tasks of five are the three tasks of three.

To add a kind, write a function `KIND(source, *, tasks, seed, held_out, …) -> Stream` here and add it to `KINDS` at the end. Its
keyword-only arguments become the options of `stream("KIND-SOURCE", …)`, of TOML files and of the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from selfless.data.part import Part
from selfless.data.rng import draw_order, draw_uniform, split_by_class
from selfless.data.sources.base import Source
from selfless.data.tasks import Stream, Task


@dataclass(frozen=True)
class SplitSource:
    """A source's rows for training, held-out selection and testing, with labels as output columns."""

    train: Part
    held_out: Part | None
    test: Part

    def select(self, columns: range | None = None, **change: object) -> tuple[Part, Part | None, Part]:
        """Return the three parts, limited to the rows whose label is in `columns`, with fields changed."""

        def view(part: Part) -> Part:
            rows = part.rows
            if columns is not None:
                label = part.labels[rows]
                rows = rows[(label >= columns.start) & (label < columns.stop)]
            return replace(part, rows=rows, **change)  # type: ignore[arg-type]

        return view(self.train), None if self.held_out is None else view(self.held_out), view(self.test)


def split_source(source: Source, held_out: float, seed: int, columns: Tensor | None = None) -> SplitSource:
    """Split the source. `columns` (classes,) maps a class to its output column, −1 for classes that are left out."""
    kept, taken = split_by_class(source.train[1].numpy(), held_out, seed, "held-out")

    def part(half: tuple[Tensor, Tensor], rows: Tensor) -> Part:
        labels = half[1] if columns is None else columns[half[1]]
        return Part(half[0], labels, rows[labels[rows] >= 0], mean=source.mean, std=source.std)

    test = part(source.test, torch.arange(len(source.test[1])))
    aside = part(source.train, torch.from_numpy(taken)) if held_out > 0 else None
    return SplitSource(part(source.train, torch.from_numpy(kept)), aside, test)


def permuted(source: Source, *, tasks: int = 5, seed: int = 0, held_out: float = 0.0) -> Stream:
    """Make tasks that are the whole data set with its pixels in another order; the first is unchanged. One shared head."""
    parts, head, made = split_source(source, held_out, seed), range(len(source.classes)), []
    for t in range(check_tasks(tasks)):
        order = None if t == 0 else torch.from_numpy(draw_order(int(np.prod(source.shape)), seed, "permutation", t))
        train, aside, test = parts.select(pixels=order)
        made.append(Task(f"permutation {t + 1}", source.classes, (head,), train, test, aside))
    return make_stream(f"permuted-{source.name}", made, len(head), source, seed)


def rotated(
    source: Source,
    *,
    tasks: int = 5,
    seed: int = 0,
    held_out: float = 0.0,
    angles: Sequence[float] | None = None,
    max_angle: float = 180.0,
) -> Stream:
    """Make tasks that are the whole data set, rotated. One shared head.

    The angles are the given ones, else 0° for the first task and random ones below `max_angle` for the others.
    """
    parts, head, made = split_source(source, held_out, seed), range(len(source.classes)), []
    tasks = check_tasks(len(angles) if angles is not None else tasks)
    chosen = angles or [0.0, *(round(max_angle * float(u), 2) for u in draw_uniform(max(tasks, 64), seed, "angle"))][:tasks]
    for angle in chosen:
        train, aside, test = parts.select(angle=float(angle))
        made.append(Task(f"rotation {float(angle):g}°", source.classes, (head,), train, test, aside))
    return make_stream(f"rotated-{source.name}", made, len(head), source, seed)


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
    """Make tasks of a few classes each. `head="own"`: a new head per task; `"all"`: one head over all classes.

    class_order        None: shuffled by the seed; "natural"; or a list of names or numbers (classes that it leaves out are not used)
    classes_per_task   None: the standard split of the data set
    tasks              use only the first tasks of the split
    """
    if head not in ("own", "all"):
        raise ValueError(f"head must be 'own' (a new head per task) or 'all' (one over all classes), not {head!r}")
    order, step, tasks = _plan_split(source, tasks, classes_per_task, class_order, seed)
    used = tasks * step
    parts, made = split_source(source, held_out, seed, _map_columns(source, order[:used])), []
    for t in range(tasks):
        group = range(t * step, (t + 1) * step)
        train, aside, test = parts.select(group)
        own = group if head == "own" else range(used)
        names = tuple(source.classes[order[c]] for c in own)
        made.append(Task(f"split {t + 1}", names, (own,), train, test, aside, None if head == "own" else group))
    return make_stream(f"split-{source.name}", made, used, source, seed)


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
    """Make tasks without hard boundaries: a task draws its own group of classes with probability p, all others with 1 − p.

    One head over all classes. The test and held-out images of a task are those of its group.
    """
    if not 0 < p <= 1:
        raise ValueError(f"p, the share of the current group, must be in (0, 1], not {p}")
    order, step, tasks = _plan_split(source, tasks, classes_per_task, class_order, seed)
    parts, head = split_source(source, held_out, seed, _map_columns(source, order)), range(len(order))
    names, made = tuple(source.classes[c] for c in order), []
    columns = parts.train.labels[parts.train.rows]
    for t in range(tasks):
        group = range(t * step, (t + 1) * step)
        inside = (columns >= group.start) & (columns < group.stop)
        count = int(inside.sum())
        weights = torch.where(inside, p / max(count, 1), (1 - p) / max(len(columns) - count, 1)).float()
        _, aside, test = parts.select(group)
        train = replace(parts.train, weights=weights)
        made.append(Task(f"group {t + 1}", names, (head,), train, test, aside, group))
    return make_stream(f"blurred-{source.name}", made, len(head), source, seed)


def grouped(
    source: Source,
    tasks_train: Tensor,
    tasks_test: Tensor,
    aside: Tensor | None = None,
    *,
    names: Sequence[str] | None = None,
    head: str = "own",
    tasks: int | None = None,
    seed: int = 0,
    held_out: float = 0.0,
) -> Stream:
    """Make a stream of given tasks: training image i belongs to task `tasks_train[i]`.

    `head="own"`: a new head over the classes of each task; `"shared"`: one head over all classes, for tasks with the same classes.
    `aside` (n,) is True for the training images that are held out; None: a share `held_out` of them is drawn.
    """
    if head not in ("own", "shared"):
        raise ValueError(f"head must be 'own' (a new head per task) or 'shared' (one for all), not {head!r}")
    values = torch.unique(tasks_train).tolist()
    if tasks is not None and not 1 <= tasks <= len(values):
        raise ValueError(f"{source.name} has {len(values)} tasks, so tasks must be from 1 to {len(values)}, not {tasks}")
    if names is not None and (len(names) != len(values) or len(set(names)) < len(names)):
        raise ValueError(f"{source.name} has {len(values)} tasks and the names {', '.join(names)}; give each task a name of its own")
    values = values[:tasks]
    strata = tasks_train * len(source.classes) + source.train[1]
    if aside is None:
        kept, taken = (torch.from_numpy(rows) for rows in split_by_class(strata.numpy(), held_out, seed, "held-out"))
    else:
        kept, taken = torch.nonzero(~aside).flatten(), torch.nonzero(aside).flatten()
    has_held_out = held_out > 0 or aside is not None
    made, start = [], 0
    for t, value in enumerate(values):
        own_rows = kept[tasks_train[kept] == value]
        present = torch.unique(source.train[1][own_rows])
        if head == "shared":
            present, start = torch.arange(len(source.classes)), 0
        columns = torch.full((len(source.classes),), -1, dtype=torch.int64)
        columns[present] = torch.arange(start, start + len(present))
        own, start = range(start, start + len(present)), start + len(present)
        title = names[t] if names is not None else f"task {value}"

        def part(half: tuple[Tensor, Tensor], rows: Tensor, columns: Tensor = columns, title: str = title) -> Part:
            labels = columns[half[1]]
            if bool((labels[rows] < 0).any()):
                unknown = source.classes[int(half[1][rows][labels[rows] < 0][0])]
                raise ValueError(
                    f"{source.name}: {title} is tested on the class {unknown!r}, of which it has no training images; add some, or leave "
                    "the class out of its test set"
                )
            return Part(half[0], labels, rows, mean=source.mean, std=source.std)

        train = part(source.train, own_rows)
        test = part(source.test, torch.nonzero(tasks_test == value).flatten())
        tried = part(source.train, taken[tasks_train[taken] == value]) if has_held_out else None
        made.append(Task(title, tuple(source.classes[c] for c in present.tolist()), (own,), train, test, tried))
    return make_stream(source.name, made, start, source, seed)


def make_stream(name: str, tasks: list[Task], outputs: int, source: Source, seed: int) -> Stream:
    made = tuple(tasks)
    return Stream(name, made, made, outputs, source.shape, seed, source.notes, source)


def check_tasks(tasks: int) -> int:
    if tasks < 1:
        raise ValueError(f"tasks is {tasks}, and a stream has at least one task; give tasks=1 or more")
    return tasks


def order_classes(source: Source, order: Sequence[int | str] | str | None, seed: int) -> list[int]:
    """Return the classes in the order of their output columns: seeded, "natural", or given by name or number."""
    if order is None:
        return [int(c) for c in draw_order(len(source.classes), seed, "class order")]
    if isinstance(order, str):
        if order != "natural":
            raise ValueError(f"class_order must be 'natural' or a list of classes, not {order!r}")
        return list(range(len(source.classes)))
    by_name = {name: i for i, name in enumerate(source.classes)}
    numbers = [by_name.get(c, -1) if isinstance(c, str) else int(c) for c in order]
    for given, number in zip(order, numbers, strict=True):
        if not 0 <= number < len(source.classes) or numbers.count(number) > 1:
            shown = ", ".join(source.classes[:12]) + " …" * (len(source.classes) > 12)
            wrong = "is listed twice" if 0 <= number < len(source.classes) else f"is not a class of {source.name}"
            raise ValueError(f"class_order: {given!r} {wrong}; list its classes once each, by name or number from 0: {shown}")
    return numbers


def _plan_split(
    source: Source,
    tasks: int | None,
    step: int | None,
    class_order: Sequence[int | str] | str | None,
    seed: int,
) -> tuple[list[int], int, int]:
    """Return (class order, classes per task, tasks), after checking that they fit."""
    order = order_classes(source, class_order, seed)
    step = step or source.classes_per_task or (len(order) // tasks if tasks and len(order) % tasks == 0 else None)
    if step is None:
        raise ValueError(
            f"{source.name} has {len(order)} classes and no standard split into tasks; set classes_per_task=, or give each image its task "
            "(task=)"
        )
    most = len(order) // step
    if step < 1 or most < 1 or (tasks is not None and tasks > most):
        raise ValueError(
            f"{source.name} has {len(order)} classes: at most {most} tasks of {step}, not {tasks or 1}; change tasks or classes_per_task"
        )
    return order, step, check_tasks(most if tasks is None else tasks)


def _map_columns(source: Source, order: list[int]) -> Tensor:
    """Return (classes,): the output column of each class, −1 for classes that are not in `order`."""
    columns = torch.full((len(source.classes),), -1, dtype=torch.int64)
    columns[torch.tensor(order)] = torch.arange(len(order))
    return columns


KINDS: dict[str, Callable[..., Stream]] = {
    "permuted": permuted,
    "rotated": rotated,
    "split": split,
    "blurred": blurred,
}
