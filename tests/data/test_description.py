"""What a result says of its data: enough to use the network without the data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from selfless import Run, train
from selfless.data import Augment, DataDescription, Stream, describe, from_arrays, joint
from selfless.engine.scenario import arrange
from selfless.spec import Result


def tasks(**options: object) -> Stream:
    x = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (60, 3, 5, 6)).astype(np.uint8)
    y = np.arange(60) % 4
    names = ["ant", "bee", "cat", "dog"]
    return from_arrays(x, y, x[:20], y[:20], task=y // 2, classes=names, mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scenario", "columns", "outputs"), [("task", [[0, 1], [2, 3]], 4), ("class", [[0, 1], [2, 3]], 4), ("domain", [[0, 1], [0, 1]], 2)]
)
def test_each_task_has_its_columns_and_their_names(scenario: str, columns: list[list[int]], outputs: int) -> None:
    for stream in (tasks(), joint(tasks())):
        about = describe(arrange(stream, scenario))
        assert [list(task.columns) for task in about.tasks] == columns
        assert [task.classes for task in about.tasks] == [("ant", "bee"), ("cat", "dog")]
        assert about.outputs == outputs
    assert about.classes == (("ant / cat", "bee / dog") if scenario == "domain" else ("ant", "bee", "cat", "dog"))


def test_a_wide_head_names_the_columns_of_its_tasks() -> None:
    x, y = np.zeros((40, 4, 4), np.uint8), np.arange(40) % 4
    about = describe(from_arrays(x, y, x, y, kind="split", head="all", classes_per_task=2, class_order=[3, 2, 1, 0]))
    assert [(list(task.columns), task.classes) for task in about.tasks] == [([0, 1], ("3", "2")), ([2, 3], ("1", "0"))]
    turned = describe(from_arrays(x, y, x, y, kind="rotated", angles=[0, 30]))
    assert [task.transform for task in turned.tasks] == ["", "rotated by 30°"]
    assert describe(from_arrays(x, y, x, y, kind="permuted", tasks=2)).tasks[1].transform == "permuted pixels"


def test_inputs_are_prepared_as_in_training() -> None:
    stream = tasks()
    part = stream.tasks[1].test
    rows = torch.arange(len(part))
    stored = torch.cat([chunk for one in part.parts for chunk in one.chunks()])
    assert torch.equal(describe(stream).prepare(stored.numpy()), describe(stream).prepare(stored))  # type: ignore[arg-type]
    assert torch.equal(describe(stream).prepare(stored), part.resident().batch(rows)[0])
    cropped = describe(stream, Augment(resized=4, flip=True))
    assert (cropped.image_shape, cropped.input_shape) == ((3, 5, 6), (3, 4, 4))
    assert torch.equal(cropped.prepare(stored), part.resident().batch(rows, augment=Augment(centre=4))[0])
    with pytest.raises(ValueError, match=r"trained on inputs \(n, 3, 5, 6\) uint8, not \(2, 3, 5, 6\) float32"):
        cropped.prepare(stored[:2].float())


def test_a_description_survives_json() -> None:
    for about in (describe(tasks()), describe(arrange(tasks(), "class"), Augment(centre=4))):
        assert DataDescription.from_dict(json.loads(json.dumps(about.as_dict()))) == about


def test_a_record_has_the_description_and_an_old_record_has_none(tasks_npz: str, tmp_path: Path) -> None:
    run = Run(stream=tasks_npz, model="mlp-4", epochs=1)
    result = train(run, out=tmp_path)
    again = train(run, out=tmp_path)
    assert result.data is not None
    assert result.data == again.data
    assert (result.data.input_shape, len(result.data.tasks)) == ((1, 6, 6), 3)
    old = {k: v for k, v in result.as_dict().items() if k != "data"}
    assert Result.from_dict(old).data is None
    assert Result.from_dict(old).as_dict() == old
