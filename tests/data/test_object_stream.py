"""The stream of object sets: in the paper's order, a head each; and a whole run over it. Fetching, listing, verifying them by name."""

from __future__ import annotations

import gc
import hashlib
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import object_layouts as made
import pytest
import torch
from typer.testing import CliRunner

import selfless
from selfless import MAS, SLNID, Run
from selfless.cli_data import app
from selfless.data import OBJECTS, Altered, MissingData, fetch_objects, prepare_objects, stream, verify_objects
from selfless.data.sources.objects.preparing import home

pytestmark = pytest.mark.usefixtures("small_objects")
CLASSES = {"flowers": 102, "scenes": 2, "birds": 2, "cars": 3, "aircraft": 3, "actions": 10, "letters": 62, "svhn": 10}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three of the eight, put there in another order than the paper's."""
    monkeypatch.setenv("SELFLESS_DATA", str(tmp_path / "data"))
    for name in ("svhn", "birds", "scenes"):
        made.put(tmp_path / "data", name)
    return tmp_path / "data"


def test_what_is_here_in_the_papers_order(here: Path) -> None:
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


def test_named_sets_in_the_order_given(here: Path) -> None:
    found = stream("objects:svhn,scenes")
    assert [task.name for task in found.tasks] == ["svhn", "scenes"]
    assert found.name == "objects:svhn,scenes"
    assert [task.name for task in stream("objects", tasks=2).tasks] == ["scenes", "birds"]
    with pytest.raises(MissingData, match=r"cars \(Stanford Cars\) is not here.*\n.*\n(.*\n)*.*cars_train.tgz"):
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


def test_seeds_share_one_copy(here: Path) -> None:
    first, second = stream("objects:birds", seed=0), stream("objects:birds", seed=1)
    assert first.tasks[0].train.parts[0].images is second.tasks[0].train.parts[0].images
    gone = weakref.ref(first.tasks[0].train.parts[0].images)
    del first, second
    gc.collect()
    assert gone() is None, "and nobody keeps it"


def test_nothing_is_here(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"none of the eight object sets is here.*selfless data fetch objects"):
        stream("objects", data_dir=tmp_path)


def test_a_set_that_is_half_there_is_missing_and_a_damaged_one_an_error(here: Path) -> None:
    (here / "objects" / "birds" / "CUB_200_2011" / "classes.txt").unlink()
    assert [task.name for task in stream("objects").tasks] == ["scenes", "svhn"]
    with pytest.raises(MissingData, match=r"classes\.txt"):
        stream("objects:birds")
    (here / "objects" / "svhn" / "test_32x32.mat").write_bytes(b"MATLAB 5")
    with pytest.raises(Altered, match="does not start like"):
        stream("objects")


NET = """from torch import nn
def build(outputs, input_shape):
    return nn.Sequential(nn.AvgPool2d(56), nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, outputs))
"""


def test_a_run_over_the_objects(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes tasks of different sizes and heads as they are; what is missing is in the result."""
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


def test_alexnet_fits_the_stream(here: Path) -> None:
    from selfless.models import build

    found = stream("objects:birds")
    net = build("alexnet", outputs=found.outputs, input_shape=found.input_shape, seed=0)
    x, _ = found.tasks[0].test.resident("cpu").batch(torch.arange(2))
    with torch.no_grad():
        assert net(x).shape == (2, 2)


# ---------------------------------------------------------------------------------------------- fetch, list, verify, prepare
@pytest.fixture
def served(server: tuple[str, dict[str, bytes], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """SVHN and Flowers on a mirror on this machine; no other set has one that answers. Gives the requests."""
    base, files, asked = server
    for name, item in list(OBJECTS.items()):
        folder = made.put(tmp_path / "mirror", name, packed=True)
        known = []
        for file in item.files:
            data = (folder / file.name).read_bytes()
            files[f"/{file.name}"] = data
            urls = (f"{base}/{file.name}",) if name in ("svhn", "flowers", "scenes") else ("https://far.invalid/x",) if file.urls else ()
            known.append(replace(file, size=len(data), urls=urls, md5=None if name == "scenes" else hashlib.md5(data).hexdigest()))
        monkeypatch.setitem(OBJECTS, name, replace(item, files=tuple(known)))
    return asked


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.output


def test_fetch_one(served: list[str], tmp_path: Path) -> None:
    folder = fetch_objects("flowers", data_dir=tmp_path / "d")
    assert folder == tmp_path / "d" / "objects" / "flowers"
    assert sorted(p.name for p in folder.iterdir()) == ["102flowers.tgz", "imagelabels.mat", "setid.mat"]
    assert verify_objects("flowers", data_dir=tmp_path / "d").status == "reduced", "a small one"
    count = len(served)
    fetch_objects("flowers", data_dir=tmp_path / "d")
    assert len(served) == count, "what is here is not fetched again"
    (folder / "setid.mat").write_bytes(b"half")
    check = verify_objects("flowers", data_dir=tmp_path / "d")
    assert check.status == "altered"
    assert "setid.mat is not the published file" in check.detail
    fetch_objects("flowers", data_dir=tmp_path / "d")
    assert len(served) == count + 1, "what is altered is replaced, and nothing else"
    assert fetch_objects("scenes", data_dir=tmp_path / "d").name == "scenes", "MIT publishes no checksums"


def test_a_wrong_file_on_the_mirror_is_not_kept(served: list[str], server: tuple[str, dict[str, bytes], list[str]], tmp_path: Path) -> None:
    server[1]["/test_32x32.mat"] = b"something else"
    with pytest.raises(MissingData, match=r"test_32x32.mat: 127.0.0.1: MD5 hash") as error:
        fetch_objects("svhn", data_dir=tmp_path / "d")
    assert "train_32x32.mat   from" not in str(error.value), "what is there is not asked for"
    assert [p.name for p in (tmp_path / "d/objects/svhn").iterdir()] == ["train_32x32.mat"]


def test_what_was_unpacked_by_hand_is_left_alone(served: list[str], tmp_path: Path) -> None:
    folder = made.put(tmp_path / "d", "cars", made.cars_training_half())
    assert fetch_objects("cars", data_dir=tmp_path / "d") == folder
    assert not served
    (folder / "train_perfect_preds.txt").write_text("1\nx\n")
    with pytest.raises(Altered, match="'x' is not a number"):
        fetch_objects("cars", data_dir=tmp_path / "d")


def test_fetch_objects_says_what_to_place_by_hand(served: list[str], tmp_path: Path) -> None:
    root = str(tmp_path / "d")
    output = run("fetch", "objects", "--data-dir", root, code=1)
    for name in ("flowers", "svhn", "scenes"):
        assert f"{name}: {root}/objects/{name}" in output
    assert "cars (Stanford Cars) is not here:" in output
    assert "not publicly downloadable; the set's own page" in output
    assert f"Put these files, or what is in them, into {root}/objects/cars:" in output
    assert "cars_test_annos_withlabels.mat" in output
    assert "no mirror answers (far.invalid)" in output
    assert "Traceback" not in output
    found = json.loads(run("fetch", "objects", "--data-dir", root, "--json", code=1))
    assert sorted(found["fetched"]) == ["flowers", "scenes", "svhn"]
    assert sorted(found["by_hand"]) == ["actions", "aircraft", "birds", "cars", "letters"]
    assert "cars_train.tgz" in run("fetch", "cars", "--data-dir", root, code=1)


def test_list_verify_and_prepare(here: Path) -> None:
    found = {o["name"]: o for o in json.loads(run("list", "--json"))["objects"]}
    assert list(found) == list(OBJECTS)
    assert [name for name, o in found.items() if o["here"]] == ["scenes", "birds", "svhn"]
    assert found["birds"]["prepared"] == "no"
    assert "Stream: objects" in run("list")
    assert "birds: 4 + 4 (official: train_test_split.txt); 8 images in" in run("prepare", "birds")
    done = json.loads(run("prepare", "objects", "--json"))["prepared"]
    assert [(d["name"], d["images"] > 0) for d in done] == [("scenes", True), ("birds", False), ("svhn", True)]
    assert "prepared already" in run("prepare", "svhn")
    assert {o["name"]: o["prepared"] for o in json.loads(run("list", "--json"))["objects"]}["birds"] == "4 + 4"
    checks = {s["name"]: s for s in json.loads(run("verify", "--json"))["sets"]}
    assert [checks[name]["status"] for name in ("scenes", "birds", "svhn")] == ["reduced"] * 3
    assert "flowers" not in checks, "without a name, absent ones are not listed"
    run("verify", "flowers", code=1)
    run("verify", "birds")
    (folder,) = home().glob("birds-*[!k]")
    data = bytearray((folder / "images.npy").read_bytes())
    data[-1] ^= 1
    (folder / "images.npy").write_bytes(data)
    assert "changed since it was prepared" in json.loads(run("verify", "birds", "--json", code=1))["sets"][0]["detail"]
    assert "did you mean 'birds'" in run("prepare", "brids", code=1)


def test_prepare_boxes_and_errors(here: Path, tmp_path: Path) -> None:
    assert "4 + 4 (official" in run("prepare", "birds", "--boxes")
    assert prepare_objects("birds", boxes=True).fresh == (0, 0.0)
    assert "choose variant" in run("prepare", "birds", "--aircraft", "engine", code=1)
    with pytest.raises(MissingData, match=r"letters \(Chars74K, good images\) is not here"):
        prepare_objects("letters")


def test_a_set_that_cannot_be_prepared_does_not_stop_the_others(here: Path) -> None:
    (here / "objects" / "scenes" / "TrainImages.txt").write_text("")
    told = run("prepare", "objects", code=1)
    assert "birds: 4 + 4 (official" in told
    assert "svhn: 5 + 4 (official" in told
    assert told.index("svhn: ") < told.index("error: not prepared: scenes\nscenes: ")
    assert "TrainImages.txt should list category/file and lists nothing; fetch it again" in told
    assert "Traceback" not in told
    found = json.loads(run("prepare", "objects", "--json", code=1))
    assert [d["name"] for d in found["prepared"]] == ["birds", "svhn"]
    assert list(found["failed"]) == ["scenes"]
    (here / "objects" / "scenes" / "TestImages.txt").unlink()
    assert "does not hold TestImages.txt" in json.loads(run("prepare", "scenes", "birds", "--json", code=1))["failed"]["scenes"]
    assert "does not hold TestImages.txt" in json.loads(run("prepare", "scenes", "--json", code=1))["error"]


def test_prepare_where_nothing_is(tmp_path: Path) -> None:
    assert "none of the eight object sets is here" in run("prepare", "objects", "--data-dir", str(tmp_path), code=1)
