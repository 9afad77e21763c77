"""Small object sets in their published layouts, as name → bytes; and functions that write them to folders and archives."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from selfless.data import OBJECTS
from selfless.data.sources.objects.listing import Listing
from tests.data.matfiles import mat
from tests.data.published import jpeg

Files = dict[str, bytes]
SIZE = (60, 44)


def png(seed: int, size: tuple[int, int] = (20, 20), form: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(jpeg(seed, size))).save(out, form)
    return out.getvalue()


def flowers() -> Files:
    """Twelve images; 1-6 train (trnid, valid), 7-12 test; labels 1, 2, 3 in turn."""
    made = {f"jpg/image_{i:05d}.jpg": jpeg(i, SIZE) for i in range(1, 13)}
    labels = np.array([[(i - 1) % 3 + 1 for i in range(1, 13)]], dtype=np.float64)
    sets = {"trnid": [[3.0, 1.0, 2.0]], "valid": [[5.0, 4.0, 6.0]], "tstid": [[12.0, 7.0, 8.0, 9.0, 10.0, 11.0]]}
    return made | {"imagelabels.mat": mat(labels=labels), "setid.mat": mat(**{k: np.array(v) for k, v in sets.items()})}


def flower_tree() -> Files:
    made = {}
    for i in range(1, 13):
        half = "train" if i < 8 else "valid" if i < 10 else "test"
        made[f"flowers/{half}/{(i - 1) % 3 + 1}/image_{i:05d}.jpg"] = jpeg(i, SIZE)
    return made | {"cat_to_name.json": b'{"1": "pink primrose", "3": "canterbury bells"}'}


def scenes() -> Files:
    """Two categories; one image is in no list."""
    train = [f"{c}/{c}{i}.jpg" for c in ("kitchen", "bar") for i in range(3)]
    test = [f"{c}/{c}{i}.jpg" for c in ("bar", "kitchen") for i in range(3, 5)]
    images = {f"Images/{name}": jpeg(i, SIZE) for i, name in enumerate([*train, *test, "bar/unlisted.jpg"])}
    return images | {"TrainImages.txt": "\n".join(train).encode() + b"\n", "TestImages.txt": "\r\n".join(test).encode()}


def birds() -> Files:
    files = [f"{c:03d}.Bird_{c}/Bird_{c}_{i:04d}.jpg" for c in (1, 2) for i in range(4)]
    tables = {
        "images.txt": [f"{i} {name}" for i, name in enumerate(files, 1)],
        "classes.txt": ["1 001.Black_footed_Albatross", "2 002.Bird_2"],
        "image_class_labels.txt": [f"{i} {int(name[:3])}" for i, name in enumerate(files, 1)],
        "train_test_split.txt": [f"{i} {i % 2}" for i in range(1, 9)],
        "bounding_boxes.txt": [f"{i} 10.0 4.0 30.0 20.0" for i in range(1, 9)],
    }
    made = {f"CUB_200_2011/{name}": ("\n".join(lines) + "\n").encode() for name, lines in tables.items()}
    return made | {f"CUB_200_2011/images/{name}": jpeg(i, SIZE) for i, name in enumerate(files)}


def cars() -> Files:
    made: Files = {}
    for half, name in (("train", "devkit/cars_train_annos.mat"), ("test", "cars_test_annos_withlabels.mat")):
        rows = []
        for i in range(1, 7):
            file = f"{i:05d}.jpg"
            made[f"cars_{half}/{file}"] = jpeg(i + 50 * len(half), SIZE)
            box = {"bbox_x1": 11, "bbox_y1": 5, "bbox_x2": 40, "bbox_y2": 44}
            row = {k: np.array([[v]], dtype=np.uint8) for k, v in box.items()}
            rows.append({**row, "class": np.array([[i % 3 + 1]], dtype=np.uint8), "fname": file})
        made[name] = mat(annotations=rows)
    return made | {"devkit/cars_meta.mat": mat(class_names=["Acura RL", "BMW X5", "smart fortwo Convertible 2012"])}


def cars_together() -> Files:
    """Six images; the even ones test and are of the second class."""
    rows, made = [], {}
    for i in range(1, 7):
        numbers = {"bbox_x1": 11, "bbox_y1": 5, "bbox_x2": 40, "bbox_y2": 44, "class": (i + 1) % 2 + 1, "test": (i + 1) % 2}
        values = {k: np.array([[v]], dtype=np.uint8) for k, v in numbers.items()}
        rows.append({"relative_im_path": f"car_ims/{i:06d}.jpg", **values})
        made[f"car_ims/{i:06d}.jpg"] = jpeg(i, SIZE)
    return made | {"cars_annos.mat": mat(annotations=rows, class_names=["Acura RL", "BMW X5"])}


def cars_training_half() -> Files:
    made = {f"cars_train/{i:05d}.jpg": jpeg(i, SIZE) for i in range(1, 13)}
    labels = "".join(f"{(i - 1) % 2 + 1}\n" for i in range(1, 13)).encode()
    return made | {"train_perfect_preds.txt": labels, "cars_meta.mat": mat(class_names=["Acura RL", "BMW X5"])}


def aircraft() -> Files:
    top = "fgvc-aircraft-2013b/data/"
    titles = {"variant": ["707-320", "DC-3", "DC-6"], "family": ["Boeing 707", "DC-3", "DC-6"]}
    made = {f"{top}images/{1000 + i:07d}.jpg": jpeg(i, SIZE) for i in range(9)}
    for level, names in titles.items():
        lines = [f"{1000 + i:07d} {names[i % 3]}" for i in range(9)]
        made[f"{top}images_{level}_trainval.txt"] = ("\n".join(lines[:6]) + "\n").encode()
        made[f"{top}images_{level}_test.txt"] = ("\n".join(lines[6:]) + "\n").encode()
    made[f"{top}variants.txt"] = b"707-320\nDC-3\nDC-6\n"
    made[f"{top}families.txt"] = b"Boeing 707\nDC-3\nDC-6\n"
    made[f"{top}images_box.txt"] = "".join(f"{1000 + i:07d} 3 2 50 20\n" for i in range(9)).encode()
    return made


BOX = "<bndbox><xmax>50</xmax><xmin>11</xmin><ymax>40.5</ymax><ymin>1</ymin></bndbox>"
PERSON = f"<object><name>person</name><actions>{{}}</actions>{BOX}</object>"


def actions() -> Files:
    """Each image has a chair and two persons. The second person does two things in 2010_000003, and an unlisted thing in 2010_000004."""
    top, made = "VOCdevkit/VOC2012/", {}
    for i in range(1, 7):
        doing = [["jumping"], ["reading"] if i != 4 else ["other"]]
        if i == 3:
            doing[1] = ["reading", "phoning"]
        people = "".join(
            PERSON.format("".join(f"<{a}>{int(a in what)}</{a}>" for a in ("jumping", "phoning", "reading", "other"))) for what in doing
        )
        xml = f"<annotation><object><name>chair</name></object>{people}</annotation>"
        made[f"{top}Annotations/2010_{i:06d}.xml"] = xml.encode()
        made[f"{top}JPEGImages/2010_{i:06d}.jpg"] = jpeg(i, SIZE)
    for half, images in (("train", range(1, 5)), ("val", range(5, 7))):
        made[f"{top}ImageSets/Action/{half}.txt"] = "".join(f"2010_{i:06d}\n" for i in images).encode()
    return made


def letters() -> Files:
    """Five images of "0", "A" and "z"; one bad image, which is not used."""
    made = {f"English/Img/GoodImg/Bmp/Sample{c:03d}/img{c:03d}-{i:05d}.png": png(c + i) for c in (1, 11, 62) for i in range(1, 6)}
    return made | {"English/Img/BadImag/Bmp/Sample001/img001-00001.png": png(1)}


def letters_contest() -> Files:
    made = {f"data/trainResized/{i}.Bmp": png(i, form="BMP") for i in range(1, 13)}
    return made | {"data/trainLabels.csv": b"ID,Class\n" + b"".join(f"{i},{'nZ'[i % 2]}\n".encode() for i in range(1, 13))}


def svhn() -> Files:
    """Five and four pictures; picture k is all of the colour (k, 2k, 3k), its labels count from 1 to 10."""
    made = {}
    for name, n in (("train_32x32.mat", 5), ("test_32x32.mat", 4)):
        x = np.zeros((32, 32, 3, n), dtype=np.uint8)
        x += (np.arange(1, 4)[:, None] * np.arange(1, n + 1)).astype(np.uint8)
        x[0, :, :, :] = 255  # marks the first row: shows which side is up
        made[name] = mat(X=x, y=np.array([[10], [1], [2], [9], [10]], dtype=np.uint8)[:n])
    return made


LAYOUTS = {
    "flowers": flowers,
    "scenes": scenes,
    "birds": birds,
    "cars": cars,
    "aircraft": aircraft,
    "actions": actions,
    "letters": letters,
    "svhn": svhn,
}
PACKED = {  # archive → the beginnings of the names of the files in it
    "flowers": {"102flowers.tgz": ("jpg/",)},
    "scenes": {"indoorCVPR_09.tar": ("Images/",)},
    "birds": {"CUB_200_2011.tgz": ("CUB_200_2011/",)},
    "cars": {"cars_train.tgz": ("cars_train/",), "cars_test.tgz": ("cars_test/",), "car_devkit.tgz": ("devkit/",)},
    "aircraft": {"fgvc-aircraft-2013b.tar.gz": ("fgvc-aircraft-2013b/",)},
    "actions": {"VOCtrainval_11-May-2012.tar": ("VOCdevkit/",)},
    "letters": {"EnglishImg.tgz": ("English/",)},
    "svhn": {},
}


def put(root: Path, name: str, files: Mapping[str, bytes] | None = None, *, packed: bool = False) -> Path:
    """Write a set below a data folder, loose or in its archives; return the set's folder."""
    folder, rest = root / "objects" / name, dict(files if files is not None else LAYOUTS[name]())
    folder.mkdir(parents=True, exist_ok=True)
    for archive, starts in PACKED[name].items() if packed else ():
        write_archive(folder / archive, {n: rest.pop(n) for n in list(rest) if n.startswith(starts)})
    for inside, data in rest.items():
        path = folder / inside
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def write_archive(path: Path, files: Mapping[str, bytes], link: str | None = None) -> None:
    with tarfile.open(path, "w" if path.suffix == ".tar" else "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"./{name}" if not name.startswith(("/", "..")) else name)
            info.size = len(data)
            if name == link:
                info.type, info.linkname, info.size = tarfile.SYMTYPE, "/etc/passwd", 0
            tar.addfile(info, None if name == link else io.BytesIO(data))


def list_images(folder: Path, **options: object) -> Listing:
    """Read the layout of the set in `folder`, and make sure that every listed file is an image."""
    item = OBJECTS[folder.name]
    files = item.open(folder)
    found = item.list_images(files, item.choose_options(options))
    for one in found.items if found.pictures is None else ():
        assert files.locate(one.name, "list").read()[:2] in (b"\xff\xd8", b"\x89P", b"BM"), one.name
    return found
