"""One's own data as a stream: arrays and tensors, .npz files, torch datasets."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfless.data.cache import Source
from selfless.data.part import Part
from selfless.data.paths import DataError, MissingData
from selfless.data.rng import stratified
from selfless.data.streams import Stream, Task, blurred, permuted, rotated, split

KINDS: dict[str, Callable[..., Stream]] = {
    "permuted": permuted,
    "rotated": rotated,
    "split": split,
    "blurred": blurred,
}


def _tensor(x: Any) -> Tensor:
    """Without a copy where that can be: a memory-mapped array stays on disk. torch warns that a read-only array could
    be written to; nothing here writes.
    """
    if isinstance(x, Tensor):
        return x.detach().cpu()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(np.ascontiguousarray(x))


def as_images(x: Any, what: str = "images") -> Tensor:
    """(n, C, H, W): bytes stay bytes; floats become float32 and are later used as they are, not divided by 255.

    (n, H, W) gets its one channel, (n, H, W, 1 or 3) is turned, and plain features (n, d) become (n, 1, 1, d).
    """
    t = _tensor(x)
    if t.dtype not in (torch.uint8, torch.float32):
        if t.is_floating_point():
            t = t.float()
        elif t.numel() == 0 or (int(t.min()) >= 0 and int(t.max()) <= 255):
            t = t.to(torch.uint8)
        else:
            raise ValueError(f"{what} hold whole numbers outside 0 … 255; give bytes (uint8) or floats")
    if t.ndim == 2:
        t = t[:, None, None]
    elif t.ndim == 3:
        t = t[:, None]
    elif t.ndim == 4 and t.shape[3] in (1, 3) and t.shape[1] not in (1, 3):
        t = t.permute(0, 3, 1, 2)
    if t.ndim != 4:
        raise ValueError(f"{what} must be (n, d), (n, H, W) or (n, C, H, W), not {tuple(t.shape)}")
    return t.contiguous()


def as_labels(y: Any, what: str = "labels") -> Tensor:
    t = _tensor(y)
    if t.ndim != 1 or t.is_floating_point():
        raise ValueError(f"{what} must be whole numbers, one per image, not {tuple(t.shape)} {t.dtype}")
    return t.to(torch.int64)


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
    """A stream out of arrays or tensors. With `task` (one number an image) those are the tasks; without, any `kind`
    of stream is made of the whole. Test images that are not given are a seeded `test_share` of the training images;
    tasks of test images that are not given follow from their classes.
    """
    x, y = as_images(x_train, "x_train"), as_labels(y_train, "y_train")
    tasks = None if task is None else as_labels(task, "task")
    if len(x) != len(y) or (tasks is not None and len(tasks) != len(x)):
        raise ValueError(f"{len(x)} images, {len(y)} labels and {len(x if tasks is None else tasks)} task numbers")
    if x_test is None:
        strata = y if tasks is None else tasks * (int(y.max()) + 1) + y
        kept, taken = (torch.from_numpy(r) for r in stratified(strata.numpy(), test_share, seed, "test"))
        test, tasks_test = (x[taken], y[taken]), None if tasks is None else tasks[taken]
        x, y, tasks = x[kept], y[kept], None if tasks is None else tasks[kept]
    else:
        test = (as_images(x_test, "x_test"), as_labels(y_test, "y_test"))
        tasks_test = None if task_test is None else as_labels(task_test, "task_test")
    known = torch.unique(torch.cat((y, test[1])))
    names = tuple(classes) if classes is not None else tuple(str(int(c)) for c in known)
    if classes is None:  # any whole numbers will do: they are numbered anew, in order
        y, test = torch.searchsorted(known, y), (test[0], torch.searchsorted(known, test[1]))
    scale = (None if mean is None else tuple(mean), None if std is None else tuple(std))
    source = Source(name, (x, y), test, names, *scale)
    if tasks is None:
        if kind not in KINDS:
            raise ValueError(f"no kind of stream is called {kind!r} (known: {', '.join(KINDS)})")
        return KINDS[kind](source, seed=seed, **options)
    if tasks_test is None:
        tasks_test = _tasks_by_class(y, tasks, test[1])
    return grouped(source, tasks, tasks_test, seed=seed, **options)


def _tasks_by_class(y: Tensor, tasks: Tensor, y_test: Tensor) -> Tensor:
    of: dict[int, int] = {}
    for label, task in torch.unique(torch.stack((y, tasks), 1), dim=0).tolist():
        if of.setdefault(label, task) != task:
            raise ValueError(f"class {label} is in tasks {of[label]} and {task}: say with task_test= which test is whose")
    return torch.tensor([of.get(label, -1) for label in y_test.tolist()], dtype=torch.int64)


def grouped(
    source: Source,
    tasks_train: Tensor,
    tasks_test: Tensor,
    *,
    names: Sequence[str] | None = None,
    head: str = "own",
    tasks: int | None = None,
    seed: int = 0,
    held_out: float = 0.0,
) -> Stream:
    """A stream of given tasks: image i belongs to task `tasks_train[i]`. `head="own"`: a new head over each task's
    classes; `"shared"`: one head over all classes, for tasks that have the same classes.
    """
    if head not in ("own", "shared"):
        raise ValueError(f"head must be 'own' (a new head per task) or 'shared' (one for all), not {head!r}")
    values = torch.unique(tasks_train).tolist()
    if tasks is not None and not 1 <= tasks <= len(values):
        raise ValueError(f"{source.name} has {len(values)} tasks, so tasks must be from 1 to that, not {tasks}")
    values = values[:tasks]
    strata = tasks_train * len(source.classes) + source.train[1]
    kept, taken = (torch.from_numpy(rows) for rows in stratified(strata.numpy(), held_out, seed, "held-out"))
    made, start = [], 0
    for t, value in enumerate(values):
        present = torch.unique(source.train[1][tasks_train == value])
        if head == "shared":
            present, start = torch.arange(len(source.classes)), 0
        columns = torch.full((len(source.classes),), -1, dtype=torch.int64)
        columns[present] = torch.arange(start, start + len(present))
        own, start = range(start, start + len(present)), start + len(present)
        title = names[t] if names is not None else f"task {value}"

        def part(half: tuple[Tensor, Tensor], rows: Tensor, columns: Tensor = columns, title: str = title) -> Part:
            labels = columns[half[1]]
            if bool((labels[rows] < 0).any()):
                raise ValueError(f"{source.name}: {title} is tested on a class it is not trained on")
            return Part(half[0], labels, rows, mean=source.mean, std=source.std)

        train = part(source.train, kept[tasks_train[kept] == value])
        test = part(source.test, torch.nonzero(tasks_test == value).flatten())
        aside = part(source.train, taken[tasks_train[taken] == value]) if held_out > 0 else None
        made.append(Task(title, tuple(source.classes[c] for c in present.tolist()), (own,), train, test, aside))
    return Stream(source.name, tuple(made), tuple(made), start, source.shape, seed, source.notes, source)


def from_npz(path: str | os.PathLike[str], **options: Any) -> Stream:
    """`from_arrays` over a .npz with x_train, y_train and, if there are any, x_test, y_test, task, task_test."""
    place = Path(path).expanduser()
    if not place.is_file():
        raise MissingData(f"{place} is not there")
    try:
        with np.load(place, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{place} is not a plain .npz of arrays ({error}); write it with numpy.savez") from error
    if "task_train" in arrays:
        arrays["task"] = arrays.pop("task_train")
    known = {"x_train", "y_train", "x_test", "y_test", "task", "task_test"}
    if {"x_train", "y_train"} - set(arrays) or ("x_test" in arrays) != ("y_test" in arrays) or set(arrays) - known:
        raise DataError(
            f"{place} holds {', '.join(arrays)}; needed are x_train and y_train, and perhaps x_test with y_test, task and task_test"
        )
    return from_arrays(**arrays, **{"name": place.stem, **options})


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
    """Each (train, test) pair of `torch.utils.data.Dataset`s is a task; items are (image or tensor, label)."""
    halves = []
    for which in (0, 1):
        read = [_read_dataset(pair[which], f"data set {i + 1}") for i, pair in enumerate(pairs)]
        shapes = {tuple(x.shape[1:]) for x, _ in read}
        if len(shapes) != 1 or len({x.dtype for x, _ in read}) != 1:
            raise ValueError(f"the data sets must agree in shape and type; their images are {sorted(shapes)}")
        task = torch.cat([torch.full((len(y),), i) for i, (_, y) in enumerate(read)])
        halves.append((torch.cat([x for x, _ in read]), torch.cat([y for _, y in read]), task))
    (x, y, t), (x_test, y_test, t_test) = halves
    titles = names or [f"task {i + 1}" for i in range(len(pairs))]
    more = {"names": titles, "head": head, "held_out": held_out, **options}
    return from_arrays(x, y, x_test, y_test, task=t, task_test=t_test, name=name, seed=seed, **more)


def _read_dataset(dataset: Any, what: str) -> tuple[Tensor, Tensor]:
    if isinstance(dataset, torch.utils.data.TensorDataset) and len(dataset.tensors) == 2:
        return as_images(dataset.tensors[0], what), as_labels(dataset.tensors[1], what)
    items = (dataset[i] for i in range(len(dataset))) if hasattr(dataset, "__len__") else iter(dataset)
    pairs = [(x if isinstance(x, Tensor) else torch.from_numpy(np.array(x)), int(y)) for x, y in items]
    if not pairs:
        raise ValueError(f"{what} is empty")
    return as_images(torch.stack([x for x, _ in pairs]), what), as_labels([y for _, y in pairs], what)
