"""A user's own data as a stream: arrays and tensors, .npz files, torch data sets, folders of images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from selfless.data.sources.arrays import read_arrays, read_dataset, read_npz
from selfless.data.sources.folders import read_folders
from selfless.data.streams import KINDS, grouped
from selfless.data.tasks import Stream


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
        return grouped(made.source, made.tasks_train, made.tasks_test, seed=seed, **options)
    if kind not in KINDS:
        raise ValueError(f"no kind of stream is called {kind!r} (known: {', '.join(KINDS)})")
    return KINDS[kind](made.source, seed=seed, **options)


def from_npz(path: str | os.PathLike[str], **options: Any) -> Stream:
    """Call `from_arrays` with a .npz file of x_train, y_train and, if present, x_test, y_test, task, task_test."""
    place = Path(path).expanduser()
    return from_arrays(**read_npz(place), **{"name": place.stem, **options})


def from_datasets(
    pairs: Sequence[tuple[Any, Any]],
    *,
    names: Sequence[str] | None = None,
    name: str = "datasets",
    head: str = "own",
    seed: int = 0,
    held_out: float = 0.0,
    **options: Any,
) -> Stream:
    """Make a task from each (train, test) pair of `torch.utils.data.Dataset`s; their items are (image or tensor, label)."""
    halves = []
    for which in (0, 1):
        read = [read_dataset(pair[which], f"data set {i + 1}") for i, pair in enumerate(pairs)]
        shapes = {tuple(x.shape[1:]) for x, _ in read}
        if len(shapes) != 1 or len({x.dtype for x, _ in read}) != 1:
            raise ValueError(f"the data sets must agree in shape and type; their images are {sorted(shapes)}")
        task = torch.cat([torch.full((len(y),), i) for i, (_, y) in enumerate(read)])
        halves.append((torch.cat([x for x, _ in read]), torch.cat([y for _, y in read]), task))
    (x, y, t), (x_test, y_test, t_test) = halves
    titles = names or [f"task {i + 1}" for i in range(len(pairs))]
    more = {"names": titles, "head": head, "held_out": held_out, **options}
    return from_arrays(x, y, x_test, y_test, task=t, task_test=t_test, name=name, seed=seed, **more)


def from_folders(
    path: str | os.PathLike[str],
    *,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    test_share: float = 0.2,
    task_order: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int = 0,
    **options: Any,
) -> Stream:
    """Make a stream from PATH/<task>/<train|test>/<class>/*.png, or of PATH/<task>/<class>/*.png.

    Without train and test folders, a random `test_share` of each class is for testing. Tasks come in natural order (task2 before
    task10) or in `task_order`. Images keep their size if all have the same, else all get `size` (64 if not given), without distortion.
    They are grey only if every image is grey.
    """
    place = Path(path).expanduser()
    tree = read_folders(place, size=size, channels=channels, test_share=test_share, task_order=task_order, mean=mean, std=std, seed=seed)
    made = grouped(tree.source, tree.tasks_train, tree.tasks_test, names=tree.names, seed=seed, **options)
    return made if tree.note is None else replace(made, notes=(*made.notes, tree.note))
