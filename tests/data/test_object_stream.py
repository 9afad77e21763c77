"""The stream of object sets: in the paper's order, one head each; and a whole run over it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import selfless
from selfless import MAS, SLNID, Run
from selfless.data import OBJECTS, Altered, MissingData, stream
from tests.data import object_layouts as made

pytestmark = pytest.mark.usefixtures("small_objects")
CLASSES = {"flowers": 102, "scenes": 2, "birds": 2, "cars": 3, "aircraft": 3, "actions": 10, "letters": 62, "svhn": 10}


def test_sets_that_are_here_come_in_the_papers_order(three_sets: Path) -> None:
    found = stream("objects", seed=3)
    assert [task.name for task in found.tasks] == ["scenes", "birds", "svhn"]
    assert [task.heads for task in found.tasks] == [(range(0, 2),), (range(2, 4),), (range(4, 14),)]
    assert (found.outputs, found.input_shape) == (14, (3, 224, 224))
    assert found.notes[0] == "not here: flowers, cars, aircraft, actions, letters"
    assert found.notes[1].startswith("scenes is not the published set: 6 of 5360 training images, 4 of 1340 test images, 2 of 67 classes")
    birds = found.tasks[1]
    assert birds.train.targets.tolist() == [2, 2, 3, 3]
    assert birds.test.targets.tolist() == [2, 2, 3, 3]
    assert birds.classes == ("Black footed Albatross", "Bird 2")
    x, _ = birds.train.resident("cpu").batch(torch.tensor([0]))
    raw = birds.train.parts[0].images[0].float() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(x[0], (raw - mean[:, None, None]) / std[:, None, None], atol=1e-5, rtol=1e-5)


def test_all_eight_together(tmp_path: Path) -> None:
    for name in OBJECTS:
        made.put(tmp_path, name)
    found = stream("objects", data_dir=tmp_path)
    assert [task.name for task in found.tasks] == list(OBJECTS) == list(CLASSES)
    assert [len(task.heads[0]) for task in found.tasks] == list(CLASSES.values())
    assert not any(note.startswith("not here") for note in found.notes)
    assert any(note.startswith("letters: split: none is published") for note in found.notes)
    for task in found.tasks:
        for part in (task.train, task.test):
            assert set(part.targets.tolist()) <= set(task.heads[0])
            assert part.resident("cpu").x.dtype == torch.uint8
    family = stream("objects:aircraft", data_dir=tmp_path, aircraft="family")
    assert family.tasks[0].classes[0] == "Boeing 707"
    joint = stream("joint-objects:birds,svhn", data_dir=tmp_path, held_out=0.25)
    assert len(joint.tasks[0].train) + len(joint.tasks[0].held_out or ()) == 4 + 5
    assert joint.outputs == 12


def test_named_sets_in_the_order_given(three_sets: Path) -> None:
    found = stream("objects:svhn,scenes")
    assert [task.name for task in found.tasks] == ["svhn", "scenes"]
    assert found.name == "objects:svhn,scenes"
    assert [task.name for task in stream("objects", tasks=2).tasks] == ["scenes", "birds"]
    with pytest.raises(MissingData, match=r"cars \(Stanford Cars\) is not on this machine.*\n.*\n(.*\n)*.*cars_train.tgz"):
        stream("objects:svhn,cars")
    with pytest.raises(ValueError, match="did you mean 'birds'"):
        stream("objects:brids")
    with pytest.raises(ValueError, match="names a set twice"):
        stream("objects:svhn,svhn")
    with pytest.raises(ValueError, match="names no set"):
        stream("objects:")
    with pytest.raises(ValueError, match=r"3 object sets are here .* not 4"):
        stream("objects", tasks=4)
    with pytest.raises(ValueError, match=r"has no option 'box'; did you mean 'boxes'"):
        stream("objects", box=True)
    with pytest.raises(ValueError, match="choose variant"):
        stream("objects", aircraft="engine")
    with pytest.raises(ValueError, match=r"did you mean 'objects'\?"):
        stream("object")


def test_held_out_images_are_apart_and_depend_on_the_seed(tmp_path: Path) -> None:
    files = {f"English/Img/GoodImg/Bmp/Sample{c:03d}/img{c:03d}-{i:05d}.png": made.png(i) for c in (1, 2) for i in range(1, 26)}
    made.put(tmp_path, "letters", files)
    task = stream("objects", data_dir=tmp_path, held_out=0.25, seed=0).tasks[0]
    assert task.held_out is not None
    kept, aside = (set(part.parts[0].rows.tolist()) for part in (task.train, task.held_out))
    assert not kept & aside
    assert len(kept | aside) == 40
    assert len(aside) == 10
    other = stream("objects", data_dir=tmp_path, held_out=0.25, seed=1).tasks[0]
    assert set(other.train.parts[0].rows.tolist()) != kept
    assert other.test.targets.tolist() == task.test.targets.tolist(), "the test images are no part of the seed"


def test_seeds_share_one_copy(three_sets: Path) -> None:
    first, second = stream("objects:birds", seed=0), stream("objects:birds", seed=1)
    assert first.tasks[0].train.parts[0].images is second.tasks[0].train.parts[0].images
    gone = weakref.ref(first.tasks[0].train.parts[0].images)
    del first, second
    gc.collect()
    assert gone() is None, "and it is released with its last user"


def test_nothing_is_here(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"none of the eight object sets is on this machine.*selfless data fetch objects"):
        stream("objects", data_dir=tmp_path)


def test_a_set_that_is_half_there_is_missing_and_a_damaged_one_an_error(three_sets: Path) -> None:
    (three_sets / "objects" / "birds" / "CUB_200_2011" / "classes.txt").unlink()
    assert [task.name for task in stream("objects").tasks] == ["scenes", "svhn"]
    with pytest.raises(MissingData, match=r"classes\.txt"):
        stream("objects:birds")
    (three_sets / "objects" / "svhn" / "test_32x32.mat").write_bytes(b"MATLAB 5")
    with pytest.raises(Altered, match="does not start like"):
        stream("objects")


NET = """from torch import nn
def build(outputs, input_shape):
    return nn.Sequential(nn.AvgPool2d(56), nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, outputs))
"""


def test_a_run_over_the_objects(three_sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine trains tasks of different sizes and heads; the result names the missing sets."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tinynet_objects.py").write_text(NET)
    options: dict[str, Any] = {"model": "tinynet_objects:build", "epochs": 3, "batch": 4, "lr": 0.02}
    run = Run(stream="objects", preserve=MAS(0.1), sparsify=SLNID(1e-3), **options)
    result = selfless.train(run, out=tmp_path / "out")
    assert result.status == "done", result.error
    assert result.accuracy.shape == (3, 3)
    assert any("not here: flowers" in note for note in result.about["notes"])
    joint = selfless.train(Run(stream="joint-objects:birds,svhn", **options), out=tmp_path / "out")
    assert joint.accuracy.shape == (1, 2)


@pytest.mark.slow
def test_alexnet_fits_the_stream(three_sets: Path) -> None:
    from selfless.models import build

    found = stream("objects:birds")
    net = build("alexnet", outputs=found.outputs, input_shape=found.input_shape, seed=0)
    x, _ = found.tasks[0].test.resident("cpu").batch(torch.arange(2))
    with torch.no_grad():
        assert net(x).shape == (2, 2)
