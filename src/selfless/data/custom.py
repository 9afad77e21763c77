"""A user's own data as a stream: arrays and tensors, .npz files, torch and Hugging Face data sets, folders."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from selfless.data.sources.arrays import read_arrays, read_npz
from selfless.data.sources.base import Source, per_channel, suggest
from selfless.data.sources.datasets import Reading, Table, read_dataset
from selfless.data.sources.folders import read_folders
from selfless.data.streams import KINDS, grouped
from selfless.data.tasks import Stream

HALVES = ("train", "test", "held-out")


def from_arrays(
    x_train: Any,
    y_train: Any,
    x_test: Any = None,
    y_test: Any = None,
    *,
    task: Any = None,
    task_test: Any = None,
    kind: str = "split",
    name: str = "arrays",
    classes: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    test_share: float = 0.2,
    seed: int = 0,
    **options: Any,
) -> Stream:
    """Make a stream from arrays or tensors.

    With `task` (one number per image) these are the tasks; without it, a stream of any `kind` is made from all images. Without x_test, a
    random `test_share` of the training images is the test set. Without task_test, the tasks of test images follow from their classes.
    """
    made = read_arrays(
        x_train,
        y_train,
        x_test,
        y_test,
        task=task,
        task_test=task_test,
        name=name,
        classes=classes,
        mean=mean,
        std=std,
        test_share=test_share,
        seed=seed,
    )
    if made.tasks_train is not None and made.tasks_test is not None:
        known = [p.name for p in inspect.signature(grouped).parameters.values() if p.kind is p.KEYWORD_ONLY]
        other = next((option for option in options if option not in known), "kind" if kind != "split" else None)
        if other is not None:
            raise ValueError(
                f"{name} has a task number for each image, which decides the tasks, so {other}= cannot; leave out {other}=, or the task "
                f"numbers (with them there are {', '.join(known)})"
            )
        return grouped(made.source, made.tasks_train, made.tasks_test, seed=seed, **options)
    if kind not in KINDS:
        raise ValueError(f"no kind of stream is called {kind!r}{suggest(kind, KINDS)} (known: {', '.join(KINDS)})")
    return KINDS[kind](made.source, seed=seed, **options)


def from_npz(path: str | os.PathLike[str], **options: Any) -> Stream:
    """Call `from_arrays` with a .npz file of x_train, y_train and, if present, x_test, y_test, task, task_test."""
    place = Path(path).expanduser()
    arrays = read_npz(place)
    try:
        return from_arrays(**arrays, **{"name": place.stem, **options})
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def from_datasets(
    tasks_given: Sequence[Any] | Any,
    tests: Sequence[Any] | Any = None,
    *,
    names: Sequence[str] | None = None,
    name: str = "datasets",
    head: str = "own",
    classes: Sequence[str] | None = None,
    input: str | None = None,
    label: str | None = None,
    tokens: bool | None = None,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    tasks: int | None = None,
    seed: int = 0,
    held_out: float = 0.0,
) -> Stream:
    """Make a stream of data sets, which are read into memory once.

    A task is (train, test), (train, test, held-out), or a dictionary with `train`, `test` and optionally `held_out` (or `validation`),
    `name` and `classes`. Each data set is a `torch.utils.data.Dataset` with a length, a pair (inputs, labels) of arrays, a list of items,
    or a Hugging Face `datasets.Dataset`. With `tests`, the two arguments are the training and the test sets of all tasks in the same
    order, such as two Continuum scenarios.

    names           the names of the tasks
    head            "own": a new head over the classes of each task; "shared": one head over all classes
    classes         the names of the labels 0, 1, …; default: those of the data sets, else the numbers. With head="shared", classes with
                    the same name share an output column
    input, label    the names of the columns, if they are not the usual ones
    tokens          True: integers are token ids, kept as they are; default: True for a column `input_ids`
    size, channels  fit images to this size, and make them grey (1) or RGB (3)
    mean, std       per channel, for pixels in [0, 1]
    """
    listed = _pair_up(tasks_given, tests)
    chosen = [_open_task(task, t) for t, task in enumerate(listed)]
    if not chosen:
        raise ValueError("the list of tasks is empty; a task is (train, test)")
    if len({len(task.halves) for task in chosen}) > 1:
        raise ValueError("some tasks have a held-out set and others do not; give all of them one, or use held_out= to draw it")
    titles = list(names) if names is not None else [task.name or f"task {t + 1}" for t, task in enumerate(chosen)]
    if len(titles) != len(chosen) or len(set(titles)) < len(titles):
        raise ValueError(f"the {len(chosen)} tasks have the names {', '.join(titles)}; give each task a name of its own")
    how = Reading(input, label, tokens, size, channels)
    tables = {
        half: [read_dataset(task.halves[half], f"{title}, {half}", how) for task, title in zip(chosen, titles, strict=True)]
        for half in chosen[0].halves
    }
    _check_alike(tables, titles)
    given = [task.classes or classes or tables["train"][t].classes for t, task in enumerate(chosen)]
    labels, known = _number_classes({half: [table.y for table in read] for half, read in tables.items()}, given, titles, head)

    def join(*halves: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs, classes and task numbers of these halves of all tasks."""
        found = [(tables[half][t].x, labels[half][t], t) for half in halves for t in range(len(chosen))]
        numbers = torch.cat([torch.full((len(y),), t) for _, y, t in found])
        return torch.cat([x for x, _, _ in found]), torch.cat([y for _, y, _ in found]), numbers

    x, y, t_train = join(*(half for half in tables if half != "test"))
    x_test, y_test, t_test = join("test")
    aside = torch.arange(len(y)) >= sum(len(table.y) for table in tables["train"]) if "held-out" in tables else None
    source = Source(name, (x, y), (x_test, y_test), known, per_channel(mean, "mean"), per_channel(std, "std"))
    return grouped(source, t_train, t_test, aside, names=titles, head=head, tasks=tasks, seed=seed, held_out=held_out)


class _Task(NamedTuple):
    """A task as a user gives it: its data sets by half (train, test, held-out), its name and its class names if they are given."""

    halves: dict[str, Any]
    name: str | None = None
    classes: Sequence[str] | None = None


def _pair_up(tasks: Any, tests: Any) -> list[Any]:
    """Return the list of tasks; with `tests`, pair the training sets with the test sets."""
    for one in (tasks, tests):
        if one is not None and (not hasattr(one, "__getitem__") or not hasattr(one, "__len__") or isinstance(one, Mapping)):
            raise TypeError(f"a stream is made of a list of tasks (train, test), not of a {type(one).__name__}")
    if tests is None:
        return list(tasks)
    if len(tasks) != len(tests):
        raise ValueError(f"{len(tasks)} training sets and {len(tests)} test sets; there must be as many of both")
    return [(tasks[t], tests[t]) for t in range(len(tasks))]


def _open_task(task: Any, t: int) -> _Task:
    """Return the data sets of a task; raise an error that says how a task is written."""
    form = f"task {t + 1} must be (train, test), (train, test, held-out) or {{'train': …, 'test': …}}"
    if isinstance(task, Mapping):
        values = {{"validation": "held-out", "held_out": "held-out"}.get(str(key), str(key)): value for key, value in task.items()}
        unknown = set(values) - {"train", "test", "held-out", "name", "classes"}
        if not {"train", "test"} <= set(values) or (unknown and type(task) is dict):
            raise ValueError(f"{form}, and optionally 'held_out', 'name' and 'classes'; it has {', '.join(map(str, task))}")
        return _Task({half: values[half] for half in HALVES if half in values}, values.get("name"), values.get("classes"))
    if not isinstance(task, tuple | list) or len(task) not in (2, 3):
        raise TypeError(f"{form}, not {type(task).__name__}; a stream is a list of tasks, also of one: [(train, test)]")
    if any(isinstance(half, Tensor | np.ndarray) for half in task):
        raise TypeError(f"{form}; arrays come in pairs: ((x_train, y_train), (x_test, y_test))")
    return _Task(dict(zip(HALVES, task, strict=False)))


def _check_alike(tables: Mapping[str, Sequence[Table]], titles: Sequence[str]) -> None:
    """Raise ValueError unless all inputs have one shape and type: a network has one input."""
    found = {
        f"{title}, {half}": (tuple(t.x.shape[1:]), t.x.dtype)
        for half, read in tables.items()
        for title, t in zip(titles, read, strict=True)
    }
    (first, kind), *others = found.items()
    for other, (shape, dtype) in others:
        if (shape, dtype) != kind:
            raise ValueError(
                f"the data sets must agree in shape and type: {first} has inputs {kind[0]} {str(kind[1])[6:]}, {other} {shape} "
                f"{str(dtype)[6:]}; convert them in the data sets. size= and channels= do so for pictures and bytes (uint8)"
            )


def _number_classes(
    labels: Mapping[str, Sequence[Tensor]], given: Sequence[Sequence[str] | None], titles: Sequence[str], head: str
) -> tuple[dict[str, list[Tensor]], tuple[str, ...]]:
    """Return the labels as numbers of classes, and the names of the classes. Tasks with a class of the same name share the class."""
    present = [torch.unique(torch.cat([half[t] for half in labels.values()])) for t in range(len(titles))]
    if head == "shared" and len({names is None for names in given}) > 1:
        raise ValueError("some tasks name their classes and others do not, so it is not clear which they share; give classes=")
    for title, names, found in zip(titles, given, present, strict=True):
        if names is not None and (int(found[-1]) >= len(names) or len(set(names)) < len(names)):
            raise ValueError(f"{title} has labels up to {int(found[-1])} and {len(set(names))} different class names; name each label once")
    if all(names is None for names in given):
        known = [str(c) for c in torch.unique(torch.cat(present)).tolist()]
    else:
        known = list(dict.fromkeys(_name(c, names) for names, found in zip(given, present, strict=True) for c in found.tolist()))
    numbers = {name: i for i, name in enumerate(known)}
    tables = [torch.tensor([numbers[_name(c, names)] for c in found.tolist()]) for names, found in zip(given, present, strict=True)]
    coded = {half: [tables[t][torch.searchsorted(present[t], y)] for t, y in enumerate(read)] for half, read in labels.items()}
    return coded, tuple(known)


def _name(label: int, names: Sequence[str] | None) -> str:
    return str(label) if names is None else names[label]


def from_folders(
    path: str | os.PathLike[str],
    *,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    test_share: float = 0.2,
    task_order: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int = 0,
    **options: Any,
) -> Stream:
    """Make a stream from PATH/<task>/<train|test>/<class>/*.png, or of PATH/<task>/<class>/*.png.

    Without train and test folders, a random `test_share` of each class is for testing. Tasks come in natural order (task2 before
    task10) or in `task_order`. Images keep their size if all have the same, else all get `size` (64 if not given), without distortion.
    They are grey only if every image is grey. `names` are the names of the tasks, if not those of their folders.
    """
    place = Path(path).expanduser()
    tree = read_folders(place, size=size, channels=channels, test_share=test_share, task_order=task_order, mean=mean, std=std, seed=seed)
    made = grouped(tree.source, tree.tasks_train, tree.tasks_test, names=names or tree.names, seed=seed, **options)
    return made if tree.note is None else replace(made, notes=(*made.notes, tree.note))
