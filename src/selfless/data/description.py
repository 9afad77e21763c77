"""What is needed to use a trained network on new data: input shape, normalisation, and the output columns and class names of each task.

`describe` reads it from a stream. A result has it as `result.data`, and its record as the entry "data".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from selfless.data.augment import Augment
from selfless.data.part import Resident
from selfless.data.tasks import Stream, Task

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class TaskDescription:
    """One task of a trained network.

    columns    the output columns of its classes
    classes    the names of these columns, in order
    transform  how the task changes its inputs: "" (not at all), "permuted pixels", or "rotated by 30°"
    """

    name: str
    columns: range
    classes: tuple[str, ...]
    transform: str = ""


@dataclass(frozen=True)
class DataDescription:
    """The data of a run, without the data.

    image_shape   (C, H, W) of the stored inputs
    input_shape   (C, H, W) that the network takes: smaller than `image_shape` if test images are cropped at the centre
    dtype         "uint8" (bytes, divided by 255) or "float32" (used as they are)
    mean, std     per channel, applied after that division; None: inputs are neither shifted nor scaled further
    outputs       how many output columns the network has
    tasks         the tasks on which the network is evaluated, in order
    """

    image_shape: Shape
    input_shape: Shape
    dtype: str
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    outputs: int
    tasks: tuple[TaskDescription, ...]

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of all output columns; "a / b" where tasks share a column under several names."""
        found: list[dict[str, None]] = [{} for _ in range(self.outputs)]
        for task in self.tasks:
            for column, name in zip(task.columns, task.classes, strict=True):
                found[column][name] = None
        return tuple(" / ".join(names) for names in found)

    def class_names(self, columns: range) -> tuple[str, ...]:
        """The names of some output columns. Where classes of several tasks have the same name, that of the task follows: "on (night)"."""
        plain = self.classes
        titles = [task.name for task in self.tasks]
        owners: dict[int, list[str]] = {}
        for t, task in enumerate(self.tasks):
            for column in task.columns:
                owners.setdefault(column, []).append(task.name if titles.count(task.name) == 1 else f"task {t + 1}")
        shown = [plain[c] for c in columns]
        return tuple(
            f"{plain[c]} ({owners[c][0]})" if shown.count(plain[c]) > 1 and len(owners.get(c, ())) == 1 else plain[c] for c in columns
        )

    def prepare(self, x: Tensor) -> Tensor:
        """Return images (n, C, H, W) of `image_shape` and `dtype` as the network takes them: cropped, scaled and shifted, in float32."""
        x = torch.as_tensor(x)
        if tuple(x.shape[1:]) != self.image_shape or x.dtype != getattr(torch, self.dtype):
            given = f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
            raise ValueError(f"the network was trained on inputs (n, {', '.join(map(str, self.image_shape))}) {self.dtype}, not {given}")
        if self.input_shape != self.image_shape:
            x = Augment(centre=self.input_shape[1])(x)
        return Resident(x, torch.zeros(len(x), dtype=torch.int64, device=x.device), mean=self.mean, std=self.std).normalise(x)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        tasks = [asdict(task) | {"columns": [task.columns.start, task.columns.stop]} for task in self.tasks]
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()} | {
            "tasks": [task | {"classes": list(task["classes"])} for task in tasks]
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataDescription:
        """Return the description that `as_dict` gives."""
        tasks = tuple(TaskDescription(t["name"], range(*t["columns"]), tuple(t["classes"]), t["transform"]) for t in values["tasks"])
        mean, std = (None if values[name] is None else tuple(values[name]) for name in ("mean", "std"))
        image, network = tuple(values["image_shape"]), tuple(values["input_shape"])
        return cls(image, network, values["dtype"], mean, std, values["outputs"], tasks)


def describe(stream: Stream, augment: Augment | None = None) -> DataDescription:
    """Return the description of a stream whose training images are augmented by `augment`."""
    part = stream.tasks[0].train.parts[0]
    dtype = str(part.images.dtype).removeprefix("torch.")
    shape = augment.shape(stream.input_shape) if augment else stream.input_shape
    tasks = tuple(_describe_task(task) for task in stream.evaluate)
    return DataDescription(stream.input_shape, shape, dtype, part.mean, part.std, stream.outputs, tasks)


def _describe_task(task: Task) -> TaskDescription:
    part, columns, names = task.test.parts[0], task.own or task.columns, task.names
    transform = "permuted pixels" if part.pixels is not None else f"rotated by {part.angle:g}°" if part.angle % 360 else ""
    return TaskDescription(task.name, columns, tuple(names[c] for c in columns), transform)
