"""Arrays and .npz files as a Source."""

from __future__ import annotations

import struct
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from selfless.data.errors import DataError, MissingData
from selfless.data.rng import split_by_class
from selfless.data.sources.base import Source, per_channel

UNREADABLE = (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, RuntimeError)
UNREADABLE += (MemoryError, SyntaxError)  # type: ignore[assignment]  # a header that promises terabytes, or is no Python literal
AT_ONCE = 2**22  # numbers that are checked at a time
NPZ_ARRAYS = {"x_train", "y_train", "x_test", "y_test", "task", "task_test"}


class GroupedSource(NamedTuple):
    """A Source, and the task number of each training and test image if the tasks are given."""

    source: Source
    tasks_train: Tensor | None
    tasks_test: Tensor | None


def read_arrays(
    x_train: Any,
    y_train: Any,
    x_test: Any = None,
    y_test: Any = None,
    *,
    task: Any = None,
    task_test: Any = None,
    name: str = "arrays",
    classes: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    test_share: float = 0.2,
    seed: int = 0,
) -> GroupedSource:
    """Make a Source of arrays or tensors.

    Without x_test, a random `test_share` of the training images is the test set. Without task_test, the tasks of test images follow
    from their classes.
    """
    x, y = as_images(x_train, "x_train"), as_labels(y_train, "y_train")
    tasks = None if task is None else as_labels(task, "task")
    check_finite(x, "x_train", tasks)
    if len(x) != len(y) or (tasks is not None and len(tasks) != len(x)):
        raise ValueError(
            f"{len(x)} images, {len(y)} labels and {len(x if tasks is None else tasks)} task numbers; their numbers must be equal"
        )
    if x_test is None:
        strata = y if tasks is None else tasks * (int(y.max()) + 1) + y
        kept, taken = (torch.from_numpy(r) for r in split_by_class(strata.numpy(), test_share, seed, "test"))
        test, tasks_test = (x[taken], y[taken]), None if tasks is None else tasks[taken]
        x, y, tasks = x[kept], y[kept], None if tasks is None else tasks[kept]
    else:
        test = (as_images(x_test, "x_test"), as_labels(y_test, "y_test"))
        tasks_test = None if task_test is None else as_labels(task_test, "task_test")
        if len(test[0]) != len(test[1]) or (tasks_test is not None and len(tasks_test) != len(test[0])):
            counts = f"{len(test[0])} images, {len(test[1])} labels and {len(test[0] if tasks_test is None else tasks_test)} task numbers"
            raise ValueError(f"the test data have {counts}; their numbers must be equal")
        if test[0].shape[1:] != x.shape[1:]:
            raise ValueError(f"x_train holds images {tuple(x.shape[1:])} and x_test {tuple(test[0].shape[1:])}; they must be equal")
        check_finite(test[0], "x_test", tasks_test)
    known = torch.unique(torch.cat((y, test[1])))
    names = tuple(classes) if classes is not None else tuple(str(int(c)) for c in known)
    if classes is None:  # labels may be any whole numbers: they are numbered anew, in order
        y, test = torch.searchsorted(known, y), (test[0], torch.searchsorted(known, test[1]))
    source = Source(name, (x, y), test, names, per_channel(mean, "mean"), per_channel(std, "std"))
    if tasks is not None and tasks_test is None:
        tasks_test = _tasks_by_class(y, tasks, test[1])
    return GroupedSource(source, tasks, tasks_test)


def as_images(x: Any, what: str = "images") -> Tensor:
    """Return images as (n, C, H, W). Bytes stay bytes; floats become float32 and are not divided by 255 later.

    (n, H, W) gets one channel, (n, H, W, 1 or 3) is transposed, and features (n, d) become (n, 1, 1, d).
    """
    t = _as_tensor(x)
    if t.dtype not in (torch.uint8, torch.float32):
        if t.is_floating_point():
            t = t.float()
        elif t.numel() == 0 or (int(t.min()) >= 0 and int(t.max()) <= 255):
            t = t.to(torch.uint8)
        else:
            raise ValueError(f"{what} hold whole numbers outside 0 … 255; give bytes (uint8) or floats, or tokens=True for token ids")
    if t.ndim == 2:
        t = t[:, None, None]
    elif t.ndim == 3:
        t = t[:, None]
    elif t.ndim == 4 and t.shape[3] in (1, 3) and t.shape[1] not in (1, 3):
        t = t.permute(0, 3, 1, 2)
    if t.ndim != 4 or 0 in t.shape:
        raise ValueError(f"{what} must be (n, d), (n, H, W) or (n, C, H, W) with at least one image, not {tuple(t.shape)}")
    return t.contiguous()


def check_finite(x: Tensor, what: str, tasks: Tensor | None = None) -> None:
    """Raise ValueError for the first input with NaN or infinity. `tasks` (n,) has the number of its task, if tasks are given."""
    if not x.is_floating_point():
        return
    rows = max(1, AT_ONCE // max(1, x[:1].numel()))
    for start in range(0, len(x), rows):
        wrong = ~x[start : start + rows].flatten(1).isfinite().all(1)
        if bool(wrong.any()):
            i = start + int(wrong.nonzero()[0])
            task = f", of task {int(tasks[i])}," if tasks is not None and i < len(tasks) else ""
            kind = "NaN" if bool(x[i].isnan().any()) else "infinity"
            raise ValueError(f"{what}: sample {i} (from 0){task} contains {kind}; leave it out, or replace the values: numpy.nan_to_num(x)")


def as_labels(y: Any, what: str = "labels") -> Tensor:
    """Return labels as (n,) int64."""
    if not isinstance(y, Tensor) and np.asarray(y).dtype.kind in "USO":
        raise ValueError(f"{what} must be whole numbers, not text; number the names: numpy.unique(names, return_inverse=True)[1]")
    t = _as_tensor(y)
    if t.ndim != 1 or t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise ValueError(f"{what} must be whole numbers, one per image, not {tuple(t.shape)} {t.dtype}")
    return t.to(torch.int64)


def _as_tensor(x: Any) -> Tensor:
    """Return a tensor, if possible without a copy: a memory-mapped array stays on disk."""
    if isinstance(x, Tensor):
        return x.detach().cpu()
    with warnings.catch_warnings():  # torch warns that a read-only array could be written to; nothing here writes
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(np.ascontiguousarray(x))


def _tasks_by_class(y: Tensor, tasks: Tensor, y_test: Tensor) -> Tensor:
    """Return the task of each test image: the one whose training images have its class; −1 if none has."""
    of: dict[int, int] = {}
    for label, task in torch.unique(torch.stack((y, tasks), 1), dim=0).tolist():
        if of.setdefault(label, task) != task:
            raise ValueError(f"class {label} is in tasks {of[label]} and {task}; give the task of each test image with task_test=")
    return torch.tensor([of.get(label, -1) for label in y_test.tolist()], dtype=torch.int64)


def read_npz(place: Path) -> dict[str, Any]:
    """Return the arrays of a .npz file: x_train, y_train and, if present, x_test, y_test, task, task_test."""
    if not place.is_file():
        raise MissingData(f"{place} is not there; check the path")
    try:
        with place.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except UNREADABLE as error:
        raise DataError(f"{place} is not a plain .npz of arrays ({error}); write it with numpy.savez") from error
    if "task_train" in arrays:
        arrays["task"] = arrays.pop("task_train")
    if {"x_train", "y_train"} - set(arrays) or ("x_test" in arrays) != ("y_test" in arrays) or set(arrays) - NPZ_ARRAYS:
        raise DataError(
            f"{place} holds {', '.join(arrays)}; needed are x_train and y_train, and optionally x_test with y_test, task and task_test"
        )
    return arrays
