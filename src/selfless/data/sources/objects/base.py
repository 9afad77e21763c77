"""The paper's eight object sets in the paper's order: their files, where those are, what they must be, and who reads them.

Checksums are the MD5s that torchvision and other public loaders check these files by; no SHA-256s of them were found, and no sum at all of
MIT's. Sizes are rounded. A file without an address has to be put in place by hand; `hint` says where it can be had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from selfless.data.sources.base import File, suggestion
from selfless.data.sources.objects import actions, aircraft, birds, cars, flowers, letters, scenes, svhn
from selfless.data.sources.objects.files import PACKED, Shelf
from selfless.data.sources.objects.listing import Listing


@dataclass(frozen=True)
class ObjectSet:
    """One of the eight. `train`, `test`: the published numbers of images, None where the split is ours (then `total`) or where examples are
    persons (Actions, whose reader says it in the split when the lists are not whole); `also`: archives of another layout that is read too;
    `options`: those of the stream that change what is prepared."""

    name: str
    title: str
    read: Callable[[Shelf, dict[str, Any]], Listing]
    files: tuple[File, ...]
    classes: int
    train: int | None = None
    test: int | None = None
    total: int | None = None
    also: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    hint: str = ""

    @property
    def archives(self) -> tuple[str, ...]:
        return (*(file.name for file in self.files if file.name.endswith(PACKED)), *self.also)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def _file(name: str, megabytes: float, md5: str | None, *urls: str) -> File:
    return File(name, round(megabytes * 1e6), "", urls, None, md5)


_OXFORD = "https://www.robots.ox.ac.uk/~vgg/data"
_MIT = "https://web.mit.edu/torralba/www"
_SVHN = "http://ufldl.stanford.edu/housenumbers"
_VOC = "http://host.robots.ox.ac.uk/pascal/VOC/voc2012/VOCtrainval_11-May-2012.tar"

OBJECTS: dict[str, ObjectSet] = {
    item.name: item
    for item in (
        ObjectSet(
            "flowers",
            "Oxford Flowers-102",
            flowers.read,
            (
                _file("102flowers.tgz", 345, "52808999861908f626f3c1f4e79d11fa", f"{_OXFORD}/flowers/102/102flowers.tgz"),
                _file("imagelabels.mat", 0.001, "e0620be6f572b9609742df49c70aed4d", f"{_OXFORD}/flowers/102/imagelabels.mat"),
                _file("setid.mat", 0.015, "a5357ecc9cb78c4bef273ce3793fc85c", f"{_OXFORD}/flowers/102/setid.mat"),
            ),
            102,
            2040,
            6149,
        ),
        ObjectSet(
            "scenes",
            "MIT Indoor Scenes",
            scenes.read,
            (
                _file("indoorCVPR_09.tar", 2600, None, "http://groups.csail.mit.edu/vision/LabelMe/NewImages/indoorCVPR_09.tar"),
                _file("TrainImages.txt", 0.2, None, f"{_MIT}/TrainImages.txt"),
                _file("TestImages.txt", 0.05, None, f"{_MIT}/TestImages.txt"),
            ),
            67,
            5360,
            1340,
        ),
        ObjectSet(
            "birds",
            "Caltech-UCSD Birds 2011",
            birds.read,
            (
                _file(
                    "CUB_200_2011.tgz",
                    1150,
                    "97eceeb196236b17998738112f37df78",
                    "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
                ),
            ),
            200,
            5994,
            5794,
            options=("boxes",),
        ),
        ObjectSet(
            "cars",
            "Stanford Cars",
            cars.read,
            (
                _file("cars_train.tgz", 979, "065e5b463ae28d29e77c1b4b166cfe61"),
                _file("cars_test.tgz", 977, "4ce7ebf6a94d07f1952d94dd34c4d501"),
                _file("car_devkit.tgz", 0.3, "c3b158d763b6e2245038c8ad08e45376"),
                _file("cars_test_annos_withlabels.mat", 0.2, "b0a2b23655a3edd16d84508592a98d10"),
            ),
            196,
            8144,
            8041,
            also=("car_ims.tgz",),
            options=("boxes",),
            hint="the set's own page (ai.stanford.edu/~jkrause/cars) no longer serves them; copies exist, on Kaggle for one",
        ),
        ObjectSet(
            "aircraft",
            "FGVC Aircraft 2013b",
            aircraft.read,
            (
                _file(
                    "fgvc-aircraft-2013b.tar.gz",
                    2750,
                    "d4acdd33327262359767eeaa97a4f732",
                    f"{_OXFORD}/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz",
                ),
            ),
            100,
            6667,
            3333,
            options=("boxes", "aircraft"),
        ),
        ObjectSet(
            "actions",
            "PASCAL VOC 2012 Actions",
            actions.read,
            (_file("VOCtrainval_11-May-2012.tar", 2000, "6cd6e144f989b92b3379bac3b3de84fd", _VOC),),
            10,
        ),
        ObjectSet(
            "letters",
            "Chars74K, good images",
            letters.read,
            (
                _file(
                    "EnglishImg.tgz",
                    128,
                    "85d157e0c58f998e1cda8def62bcda0d",
                    "http://www.ee.surrey.ac.uk/CVSSP/demos/chars74k/EnglishImg.tgz",
                ),
            ),
            62,
            total=7705,
        ),
        ObjectSet(
            "svhn",
            "Street View House Numbers",
            svhn.read,
            (
                _file("train_32x32.mat", 182, "e26dedcc434d2e4c54c9b2d4a06d8373", f"{_SVHN}/train_32x32.mat"),
                _file("test_32x32.mat", 64, "eb5a983be6a315427106f1b164d9cef3", f"{_SVHN}/test_32x32.mat"),
            ),
            10,
            73257,
            26032,
        ),
    )
}


def object_set(name: str) -> ObjectSet:
    """The set of that name, or a ValueError that names the nearest one and all of them."""
    if name not in OBJECTS:
        raise ValueError(f"no object set is called {name!r}{suggestion(name, OBJECTS)} (known: {', '.join(OBJECTS)})")
    return OBJECTS[name]
