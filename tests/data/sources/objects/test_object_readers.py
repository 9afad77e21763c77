"""Every object set in its published layout, loose and packed; and the message about one that is not whole."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from selfless.data import OBJECTS, Altered, MissingData, verify_objects
from selfless.data.sources.objects import actions
from selfless.data.sources.objects.files import decompressed_dir, remove_decompressed
from selfless.data.sources.objects.listing import Item
from tests.data import object_layouts as made
from tests.data.matfiles import mat
from tests.data.published import jpeg

EXPECTED = {  # labels of the training images, of the test images
    "flowers": ([0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2]),
    "scenes": ([1, 1, 1, 0, 0, 0], [0, 0, 1, 1]),
    "birds": ([0, 0, 1, 1], [0, 0, 1, 1]),
    "cars": ([1, 2, 0, 1, 2, 0], [1, 2, 0, 1, 2, 0]),
    "aircraft": ([0, 1, 2, 0, 1, 2], [0, 1, 2]),
    "actions": ([0, 3, 0, 3, 0, 0], [0, 3, 0, 3]),
    "letters": ([0] * 4 + [10] * 4 + [61] * 4, [0, 10, 61]),
    "svhn": ([0, 1, 2, 9, 0], [0, 1, 2, 9]),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", OBJECTS)
def test_labels_and_halves(name: str, packed: bool, tmp_path: Path) -> None:
    folder = made.put(tmp_path, name, packed=packed)
    found = made.list_images(folder)
    assert tuple([item.label for item in half] for half in (found.train, found.test)) == EXPECTED[name]
    assert not {(i.name, i.box) for i in found.train} & {(i.name, i.box) for i in found.test}
    remove_decompressed(OBJECTS[name].open(folder))
    assert not list(decompressed_dir().glob("*.tar"))


def test_class_names(tmp_path: Path) -> None:
    for name, first in (
        ("birds", "Black footed Albatross"),
        ("cars", "Acura RL"),
        ("aircraft", "707-320"),
        ("scenes", "bar"),
        ("svhn", "0"),
    ):
        assert made.list_images(made.put(tmp_path, name)).classes[0] == first
    assert made.list_images(tmp_path / "objects" / "aircraft", aircraft="family").classes[0] == "Boeing 707"
    assert made.list_images(made.put(tmp_path, "letters")).classes[10:12] == ("A", "B")


def test_boxes(tmp_path: Path) -> None:
    boxes = {"birds": (10.0, 4.0, 40.0, 24.0), "cars": (10.0, 4.0, 40.0, 44.0), "aircraft": (2, 1, 50, 20)}
    for name, box in boxes.items():
        folder = made.put(tmp_path, name)
        assert {item.box for item in made.list_images(folder, boxes=True).items} == {box}
        assert {item.box for item in made.list_images(folder).items} == {None}
    assert {item.trim for item in made.list_images(tmp_path / "objects" / "aircraft").items} == {20}, "the line of copyright"
    assert {item.trim for item in made.list_images(tmp_path / "objects" / "aircraft", boxes=True).items} == {0}
    persons = made.list_images(made.put(tmp_path, "actions"))
    assert {item.box for item in persons.items} == {(10, 0, 50, 40)}, "always cropped to the person"


def test_persons_with_two_actions_or_another_are_left_out(tmp_path: Path) -> None:
    found = made.list_images(made.put(tmp_path, "actions"))
    assert [item.name[-10:-4] for item in found.train] == ["000001", "000001", "000002", "000002", "000003", "000004"]


def test_incomplete_actions_are_recognised_by_the_listed_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made.put(tmp_path, "actions")
    assert made.list_images(folder).split.startswith("6 of the 4588 images of the official lists: train trains")
    check = verify_objects("actions", data_dir=tmp_path)
    assert check.status == "reduced"
    assert check.detail.startswith("6 of the 4588 images")
    monkeypatch.setattr(actions, "IMAGES", 6)
    assert made.list_images(folder).split.startswith("official: train trains")
    assert verify_objects("actions", data_dir=tmp_path).status == "ok"


def test_persons_can_be_listed_by_number(tmp_path: Path) -> None:
    files = made.actions()
    lines(files, "Action/train.txt", b"2010_000001\n", b"2010_000001  3\n")
    assert [(item.name[-10:-4], item.label) for item in made.list_images(made.put(tmp_path, "actions", files)).train[:2]] == [
        ("000001", 3),
        ("000002", 0),
    ]


def test_svhn_pictures_stand_upright(tmp_path: Path) -> None:
    pictures = made.list_images(made.put(tmp_path, "svhn")).pictures
    assert pictures is not None
    assert pictures.shape == (9, 32, 32, 3)
    assert (pictures[:, 0] == 255).all(), "rows come first"
    assert pictures[3, 5, 5].tolist() == [4, 8, 12]


def test_the_tree_of_flowers(tmp_path: Path) -> None:
    folder = made.put(tmp_path, "flowers", made.flower_tree())
    own = made.list_images(folder)
    assert (len(own.train), len(own.test)) == (9, 3)
    assert own.split.startswith("not the official split")
    assert own.classes[:3] == ("pink primrose", "flower 2", "canterbury bells")
    (folder / "setid.mat").write_bytes(made.flowers()["setid.mat"])
    official = made.list_images(folder)
    assert official.split.startswith("official")
    assert [int(item.name[-9:-4]) for item in official.train] == [1, 2, 3, 4, 5, 6]
    (folder / "imagelabels.mat").write_bytes(mat(labels=np.array([[2.0] + [1.0] * 11])))
    with pytest.raises(Altered, match="not in the class that imagelabels"):
        made.list_images(folder)
    made.put(tmp_path, "flowers", {"flowers/test/1/image_00001.jpg": jpeg(1)})
    with pytest.raises(Altered, match=r"image 1 is there twice, as flowers/test/1/\S+ and flowers/train/1/\S+; fetch the images again"):
        made.list_images(folder)


def test_the_training_half_of_cars(tmp_path: Path) -> None:
    folder = made.put(tmp_path, "cars", made.cars_training_half())
    found = made.list_images(folder)
    assert sorted(item.label for item in found.test) == [0, 1]
    assert len(found.train) == 10
    assert found.split.startswith("not the official split")
    assert [item.name for item in made.list_images(folder).test] == [item.name for item in found.test], "always the same fifth"
    with pytest.raises(Altered, match="no bounding boxes"):
        made.list_images(folder, boxes=True)


@pytest.mark.parametrize("packed", [True, False])
def test_cars_in_one_archive(packed: bool, tmp_path: Path) -> None:
    folder = made.put(tmp_path, "cars", made.cars_together())
    if packed:
        made.write_archive(folder / "car_ims.tgz", {n: d for n, d in made.cars_together().items() if n.endswith(".jpg")})
        shutil.rmtree(folder / "car_ims")
    found = made.list_images(folder, boxes=True)
    assert [item.label for item in found.train] == [0, 0, 0]
    assert [item.label for item in found.test] == [1, 1, 1]
    assert found.test[0] == Item("car_ims/000002.jpg", 1, (10.0, 4.0, 40.0, 44.0))
    assert found.classes == ("Acura RL", "BMW X5")


def test_the_letters_of_the_contest(tmp_path: Path) -> None:
    found = made.list_images(made.put(tmp_path, "letters", made.letters_contest()))
    assert {found.classes[item.label] for item in found.items} == {"n", "Z"}
    assert found.train[0].name == "data/trainResized/1.Bmp"
    assert found.classes[found.train[0].label] == "Z"


Change = Callable[[made.Files], object]
CARS_TWICE = mat(
    annotations=[
        {"relative_im_path": "car_ims/000001.jpg", "class": np.array([[1]]), "test": np.array([[half]], dtype=np.uint8)} for half in (0, 1)
    ],
    class_names=["Acura RL"],
)


def lines(files: made.Files, end: str, old: bytes, new: bytes) -> None:
    (name,) = (n for n in files if n.endswith(end))
    assert old in files[name]
    files[name] = files[name].replace(old, new)


def without(end: str) -> Change:
    return lambda files: [files.pop(n) for n in list(files) if n.endswith(end)]


MALFORMED: list[tuple[str, Change, str]] = [
    ("flowers", without("setid.mat"), r"does not hold setid.mat; `selfless data fetch flowers`"),
    ("flowers", without("imagelabels.mat"), "does not hold imagelabels.mat"),
    ("flowers", without("image_00009.jpg"), "lists jpg/image_00009.jpg, which is not there"),
    ("flowers", lambda f: f.update({"imagelabels.mat": f["imagelabels.mat"][:150]}), "imagelabels.mat is cut off"),
    ("flowers", lambda f: f.update({"imagelabels.mat": mat(labels=np.array([[1.0, 103.0]]))}), "label 103 of image 2 is out of range"),
    ("flowers", lambda f: f.update({"imagelabels.mat": mat(labels="abc")}), "should be a vector of numbers"),
    ("flowers", lambda f: f.update({"setid.mat": mat(trnid=np.array([[1.0]]), valid=[], tstid=np.array([[13.0]]))}), "setid.mat"),
    ("scenes", without("TestImages.txt"), "does not hold TestImages.txt"),
    ("scenes", without("bar4.jpg"), "lists Images/bar/bar4.jpg, which is not there"),
    ("scenes", lambda f: lines(f, "TrainImages.txt", b"bar/bar1.jpg", b"../bar1.jpg"), "lists ../bar1.jpg"),
    ("scenes", lambda f: f.update({"TrainImages.txt": b""}), "lists nothing"),
    ("scenes", lambda f: f.update({"TestImages.txt": b"\xff\xfe\x00"}), "is not text"),
    ("birds", without("train_test_split.txt"), r"does not hold CUB_200_2011/train_test_split.txt"),
    ("birds", lambda f: lines(f, "image_class_labels.txt", b"8 2\n", b"8 3\n"), "image 8: 3 is out of range, which is 1 to 2"),
    ("birds", lambda f: lines(f, "image_class_labels.txt", b"8 2\n", b""), "image_class_labels.txt says nothing about image 8"),
    ("birds", lambda f: lines(f, "train_test_split.txt", b"3 1\n", b"3 x\n"), "'x' is not a number"),
    ("birds", lambda f: lines(f, "images.txt", b"1 001.", b"001."), "line 1: 1 columns instead of 2"),
    ("birds", lambda f: lines(f, "images.txt", b"8 002.", b"7 002."), "images.txt has number 7 twice"),
    ("birds", lambda f: lines(f, "train_test_split.txt", b"8 0", b"8 0\n8 1"), "train_test_split.txt has number 8 twice"),
    ("birds", without("Bird_2_0003.jpg"), "Bird_2_0003.jpg, which is not there"),
    ("cars", without("cars_test_annos_withlabels.mat"), "does not hold cars_test_annos_withlabels.mat"),
    ("cars", lambda f: f.update({"devkit/cars_meta.mat": mat(class_names=["only one"])}), "class of 00001.jpg: 2 is out of range"),
    ("cars", lambda f: f.update({"devkit/cars_meta.mat": mat(class_names=np.zeros((1, 2)))}), "should be a cell of names"),
    ("cars", lambda f: f.update({"cars_test_annos_withlabels.mat": mat(annotations=[{"fname": "00001.jpg"}])}), "has no class"),
    ("cars", without("cars_train/00004.jpg"), "00004.jpg, which is not there"),
    ("aircraft", lambda f: lines(f, "variant_test.txt", b"DC-3", b"DC-9"), "'DC-9' of image 0001007 is not in variants.txt"),
    ("aircraft", without("variants.txt"), "does not hold fgvc-aircraft-2013b/data/variants.txt"),
    ("aircraft", without("0001008.jpg"), "0001008.jpg, which is not there"),
    ("actions", without("2010_000005.xml"), r"lists VOCdevkit/VOC2012/Annotations/2010_000005.xml, which is not there"),
    ("actions", without("2010_000006.jpg"), "2010_000006.jpg, which is not there"),
    ("actions", lambda f: lines(f, "Action/val.txt", b"2010_000005", b"2010_000005  4"), "4 is out of range, which is 1 to 3"),
    ("actions", lambda f: lines(f, "Action/val.txt", b"2010_000006", b"2010_000006  2 -1"), "entry 2: 3 columns instead of 1 or 2"),
    ("actions", lambda f: lines(f, "2010_000001.xml", b"</annotation>", b""), "not whole XML"),
    ("actions", lambda f: lines(f, "2010_000001.xml", b"<annotation>", b"<!DOCTYPE a [<!ENTITY b 'c'>]><annotation>"), "declares entities"),
    ("actions", lambda f: lines(f, "2010_000001.xml", b"<xmin>11</xmin>", b""), "no whole bndbox"),
    ("letters", without(".png"), "does not hold English/Img/GoodImg"),
    ("letters", lambda f: f.update({"GoodImg/Bmp/Sample063/img063-00001.png": b""}), "out of range: 001 to 062"),
    ("svhn", without("test_32x32.mat"), "does not hold test_32x32.mat"),
    ("svhn", lambda f: f.update({"train_32x32.mat": f["train_32x32.mat"][:-40]}), "cut off"),
    (
        "svhn",
        lambda f: f.update({"test_32x32.mat": mat(X=np.zeros((32, 32, 3, 2), np.uint8), y=np.array([[1], [11]]))}),
        "label 11 is out of",
    ),
    ("svhn", lambda f: f.update({"test_32x32.mat": mat(X=np.zeros((32, 32, 3, 2), np.uint8), y=np.array([[1]]))}), "for 1 labels"),
]


@pytest.mark.parametrize(("name", "change", "message"), MALFORMED, ids=[f"{n}-{m[:24]}" for n, _, m in MALFORMED])
def test_malformed(name: str, change: Change, message: str, tmp_path: Path) -> None:
    files = made.LAYOUTS[name]()
    change(files)
    folder = made.put(tmp_path, name, files)
    with pytest.raises((Altered, MissingData), match=message) as error:
        made.list_images(folder)
    assert str(folder) in str(error.value), "it says where"
    assert re.search(r"fetch|again|refused", str(error.value)), "and the remedy"


@pytest.mark.parametrize(("name", "change", "both"), [
    ("flowers", lambda f: f.update({"setid.mat": mat(**{k: np.array([[1.0, 2.0]]) for k in ("trnid", "valid", "tstid")})}), 2),
    ("scenes", lambda f: f.update({"TestImages.txt": f["TrainImages.txt"]}), 6),
    ("birds", lambda f: lines(f, "images.txt", b"Bird_2_0003.jpg", b"Bird_2_0002.jpg"), 1),
    ("cars", lambda f: (f.clear(), f.update(made.cars_together()), f.update({"cars_annos.mat": CARS_TWICE})), 1),
    ("aircraft", lambda f: lines(f, "variant_test.txt", b"0001007", b"0001001"), 1),
    ("actions", lambda f: lines(f, "Action/val.txt", b"2010_000005", b"2010_000001"), 1),
    ("letters", lambda f: (f.clear(), f.update(made.letters_contest()), lines(f, "trainLabels.csv", b"\n", b"\n1,n\n")), 1),
])  # fmt: skip
def test_images_for_training_and_for_testing(name: str, change: Change, both: int, tmp_path: Path) -> None:
    files = made.LAYOUTS[name]()
    change(files)
    folder = made.put(tmp_path, name, files)
    with pytest.raises(Altered, match=rf"its lists have {both} images? for training and for testing, .* first; fetch them again") as error:
        made.list_images(folder)
    assert str(folder) in str(error.value)
    assert verify_objects(name, data_dir=tmp_path).status == "altered"


@pytest.mark.parametrize(("name", "end", "old", "new", "message"), [
    ("birds", "bounding_boxes.txt", b"8 10.0", b"7 10.0", "bounding_boxes.txt has number 7 twice"),
    ("birds", "bounding_boxes.txt", b"8 10.0", b"9 10.0", "says nothing about image 8"),
    ("birds", "bounding_boxes.txt", b"8 10.0", b"8 left", "the box of image 8 is left"),
    ("aircraft", "images_box.txt", b"0001004 3", b"0009999 3", "says nothing about image 0001004"),
])  # fmt: skip
def test_malformed_boxes(name: str, end: str, old: bytes, new: bytes, message: str, tmp_path: Path) -> None:
    files = made.LAYOUTS[name]()
    lines(files, end, old, new)
    folder = made.put(tmp_path, name, files)
    assert made.list_images(folder).items, "not asked for, not read"
    with pytest.raises(Altered, match=message):
        made.list_images(folder, boxes=True)
