"""MIT Indoor Scenes: Images/<category>/*.jpg, and two lists of `category/file`, TrainImages.txt and TestImages.txt.

Official split: 80 training and 20 test images of each of 67 categories. The archive holds 15,620 images; the others are in no list.
"""

from __future__ import annotations

from typing import Any

from selfless.data.errors import Altered
from selfless.data.sources.objects.base import ObjectSet, published_file
from selfless.data.sources.objects.files import SetFiles
from selfless.data.sources.objects.listing import Item, Listing


def read(files: SetFiles, options: dict[str, Any]) -> Listing:
    """List the images of a copy, in the layout above."""
    lists = [files.require(name) for name in ("TrainImages.txt", "TestImages.txt")]
    lines = [[line.strip() for line in files.read_text(name).splitlines() if line.strip()] for name in lists]
    for name, paths in zip(lists, lines, strict=True):
        if not paths or any(path.count("/") != 1 or ".." in path for path in paths):
            wrong = next((path for path in paths if path.count("/") != 1 or ".." in path), "nothing")
            raise Altered(f"{files.folder}: {name} should list category/file and lists {wrong}; fetch it again")
    classes = sorted({path.split("/")[0] for paths in lines for path in paths})
    number = {c: i for i, c in enumerate(classes)}
    top = files.find_top(lines[0][0])
    train, test = (tuple(Item(top + path, number[path.split("/")[0]]) for path in paths) for paths in lines)
    return Listing(tuple(classes), train, test, "official: TrainImages.txt and TestImages.txt", tuple(lists))


_MIT = "https://web.mit.edu/torralba/www"

SCENES = ObjectSet(
    "scenes",
    "MIT Indoor Scenes",
    read,
    (
        published_file("indoorCVPR_09.tar", 2600, None, "http://groups.csail.mit.edu/vision/LabelMe/NewImages/indoorCVPR_09.tar"),
        published_file("TrainImages.txt", 0.2, None, f"{_MIT}/TrainImages.txt"),
        published_file("TestImages.txt", 0.05, None, f"{_MIT}/TestImages.txt"),
    ),
    67,
    5360,
    1340,
)
