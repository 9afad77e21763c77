"""Prepare object sets: the right pixels, once, resumed after a kill, never half-made."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from selfless.data import OBJECTS, Altered, DataError, MissingData, prepare_objects
from selfless.data.sources.objects import fitting, preparing
from selfless.data.sources.objects.preparing import check_prepared, open_prepared, prepared_dir
from tests.data import object_layouts as made
from tests.data.published import jpeg

pytestmark = pytest.mark.usefixtures("small_objects")


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a random picture with detail in it."""
    rng = np.random.Generator(np.random.PCG64(seed))
    small = rng.integers(0, 256, (max(2, height // 12), max(2, width // 12), 3)).astype(np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, form, **({"quality": 95} if form == "JPEG" else {}))
    return out.getvalue()


def resize_and_crop(image: Image.Image) -> np.ndarray:
    """Scale the short side to 256, then crop the centre: torchvision's Resize(256) and CenterCrop(224)."""
    width, height = image.size
    scale = 256 / min(width, height)
    size = (256, int(256 * height / width)) if width <= height else (int(256 * width / height), 256)
    assert scale > 0
    big = image.convert("RGB").resize(size, Image.Resampling.BILINEAR)
    left, top = round((size[0] - 224) / 2), round((size[1] - 224) / 2)
    return np.asarray(big.crop((left, top, left + 224, top + 224))).transpose(2, 0, 1).astype(int)


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (256, 256), (300, 257), (20, 20), (90, 31), (1024, 683)])
def test_the_same_pixels_as_resizing_and_cropping(size: tuple[int, int]) -> None:
    image = photo(*size)
    assert np.abs(fitting.fit(encoded(image)) - resize_and_crop(image)).max() <= 1


def test_a_large_jpeg_is_decoded_small() -> None:
    image = photo(1600, 1200)
    data = encoded(image, "JPEG")
    exact = resize_and_crop(Image.open(io.BytesIO(data)))
    assert np.abs(fitting.fit(data) - exact).mean() < 2.5
    assert fitting.fit(encoded(image.convert("L"), "JPEG")).shape == (3, 224, 224)
    assert fitting.fit(encoded(image.convert("CMYK"), "JPEG")).shape == (3, 224, 224)


def test_boxes_and_trimming() -> None:
    image = photo(400, 300)
    box = (50, 40, 350, 290)
    assert np.abs(fitting.fit(encoded(image), box)[:, 8:-8, 8:-8] - resize_and_crop(image.crop(box))[:, 8:-8, 8:-8]).max() <= 2
    assert np.abs(fitting.fit(encoded(image), None, 20)[:, :-8] - resize_and_crop(image.crop((0, 0, 400, 280)))[:, :-8]).max() <= 2
    beyond = fitting.fit(encoded(image), (-5, -9, 900, 900))
    assert np.array_equal(beyond, fitting.fit(encoded(image))), "a box is cut at the image"
    with pytest.raises(ValueError, match="leaves nothing of an image of 400×300"):
        fitting.fit(encoded(image), (500, 0, 600, 100))


def test_prepared_once_and_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made.put(tmp_path, "birds", packed=True)
    first = prepare_objects("birds", data_dir=tmp_path)
    assert first.fresh[0] == 8
    assert first.images().shape == (8, 3, 224, 224)
    assert first.labels().tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    about = json.loads((first.folder / "about.json").read_text())
    assert (about["train"], about["test"], about["options"]) == (4, 4, {"boxes": False})
    assert len(about["files"]["CUB_200_2011.tgz"]["sha256"]) == 64
    assert sorted(p.name for p in first.folder.iterdir()) == ["about.json", "images.npy", "labels.npy", "rows.npy"]
    assert sorted(p.name for p in prepared_dir().iterdir() if p.suffix != ".lock") == [first.folder.name, "unpacked"]
    assert not list((prepared_dir() / "unpacked").iterdir()), "the unpacked archive is removed"
    with monkeypatch.context() as patched:
        patched.setattr(preparing, "prepare", lambda *a: pytest.fail("prepared again"))
        patched.setattr(fitting, "fit", lambda *a: pytest.fail("fitted again"))
        again = prepare_objects("birds", data_dir=tmp_path)
    assert again.folder == first.folder
    assert again.fresh == (0, 0.0)
    crops = prepare_objects("birds", data_dir=tmp_path, boxes=True)
    assert crops.folder != first.folder
    assert not np.array_equal(crops.images(), first.images())
    (folder / "CUB_200_2011.tgz").unlink()
    assert prepare_objects("birds", data_dir=tmp_path, boxes=True).folder == crops.folder, "the files are not needed any more"
    assert prepare_objects("birds", data_dir=tmp_path).folder == first.folder
    with pytest.raises(MissingData, match="svhn"):
        prepare_objects("svhn", data_dir=tmp_path)


def test_changed_files_give_another_array(tmp_path: Path) -> None:
    folder = made.put(tmp_path, "scenes")
    first = prepare_objects("scenes", data_dir=tmp_path)
    (folder / "Images/bar/bar0.jpg").write_bytes(jpeg(77, (70, 50)))
    second = prepare_objects("scenes", data_dir=tmp_path)
    assert second.folder != first.folder
    changed = [not np.array_equal(a, b) for a, b in zip(first.images(), second.images(), strict=True)]
    assert changed == [False, False, False, True, *[False] * 6]
    assert first.about["images_sha256"] != second.about["images_sha256"]


def many(root: Path, count: int = 150, *, broken: int | None = None) -> Path:
    files = {f"English/Img/GoodImg/Bmp/Sample001/img001-{i:05d}.png": made.png(i) for i in range(1, count + 1)}
    if broken is not None:
        files[f"English/Img/GoodImg/Bmp/Sample001/img001-{broken:05d}.png"] = b"not a picture"
    return made.put(root, "letters", files, packed=True)


@pytest.mark.slow
def test_workers_give_the_same_bytes_as_none(tmp_path: Path) -> None:
    folder = many(tmp_path)
    with_workers = prepare_objects("letters", data_dir=tmp_path, workers=2)
    images = with_workers.images().copy()
    os.utime(folder / "EnglishImg.tgz", (1, 1))  # another time of the file gives another key
    without = prepare_objects("letters", data_dir=tmp_path, workers=0)
    assert without.folder != with_workers.folder
    assert np.array_equal(without.images(), images)
    assert without.about["images_sha256"] == with_workers.about["images_sha256"]


@pytest.mark.slow
def test_an_image_that_cannot_be_read(tmp_path: Path) -> None:
    many(tmp_path, broken=97)
    for workers in (2, 0):
        with pytest.raises(Altered, match=r"letters: .*img001-00097\.png is not a readable image .*; fetch it again"):
            prepare_objects("letters", data_dir=tmp_path, workers=workers)
    assert not [p for p in prepared_dir().iterdir() if open_prepared(p)], "nothing looks finished"


KILLED = """import os, signal, sys
from selfless.data.sources.objects import fitting
from dataclasses import replace
from selfless.data import OBJECTS, prepare_objects
OBJECTS["letters"] = replace(OBJECTS["letters"], files=(replace(OBJECTS["letters"].files[0], md5=None),))
real, count = fitting.fit, [0]
def fit(*arguments):
    count[0] += 1
    if count[0] == 101:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)
fitting.fit = fit
prepare_objects("letters", data_dir=sys.argv[1], workers=0)
"""


@pytest.mark.slow
def test_a_kill_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = many(tmp_path)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    (part,) = prepared_dir().glob("letters-*.part")
    assert not [p for p in prepared_dir().iterdir() if open_prepared(p)]
    fitted: list[int] = []
    real = fitting.fit
    monkeypatch.setattr(fitting, "fit", lambda *a: fitted.append(1) or real(*a))
    ready = prepare_objects("letters", data_dir=tmp_path, workers=0)
    assert len(fitted) == 50, "a hundred were done"
    assert ready.fresh[0] == 50
    assert not part.exists()
    check_prepared(ready)
    os.utime(folder / "EnglishImg.tgz", (1, 1))
    assert np.array_equal(prepare_objects("letters", data_dir=tmp_path, workers=0).images(), ready.images()), "as without the kill"


def test_after_a_restart_of_the_machine_nothing_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many(tmp_path, 20, broken=15)
    with pytest.raises(Altered):
        prepare_objects("letters", data_dir=tmp_path, workers=0)
    monkeypatch.setattr(preparing, "boot_id", lambda: "another")
    fitted: list[int] = []
    real = fitting.fit
    monkeypatch.setattr(fitting, "fit", lambda *a: fitted.append(1) or real(*a))
    with pytest.raises(Altered):
        prepare_objects("letters", data_dir=tmp_path, workers=0)
    assert len(fitted) > 10, "pages may have been lost: none is trusted"


def test_a_worker_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many(tmp_path)
    script = tmp_path / "worker.py"
    script.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.setattr(fitting, "__file__", str(script))
    with pytest.raises(DataError, match="ended with status -9; run it again: it continues where it stopped"):
        prepare_objects("letters", data_dir=tmp_path, workers=2)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made.put(tmp_path, "scenes")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 5})())
    with pytest.raises(DataError, match=r"10 images take 0.0 GB in .*make room"):
        prepare_objects("scenes", data_dir=tmp_path)


def test_a_file_that_is_not_the_published_one_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = OBJECTS["birds"]
    monkeypatch.setitem(OBJECTS, "birds", replace(item, files=(replace(item.files[0], md5="0" * 32),)))
    made.put(tmp_path, "birds", packed=True)
    with pytest.raises(Altered, match=r"CUB_200_2011\.tgz is not the published file"):
        prepare_objects("birds", data_dir=tmp_path)


def test_an_altered_array(tmp_path: Path) -> None:
    made.put(tmp_path, "scenes")
    ready = prepare_objects("scenes", data_dir=tmp_path)
    check_prepared(ready)
    path = ready.folder / "images.npy"
    data = bytearray(path.read_bytes())
    data[-5] ^= 255
    path.write_bytes(data)
    with pytest.raises(Altered, match="image 9 has changed since it was prepared"):
        check_prepared(ready)
    path.write_bytes(data[:-1])
    assert open_prepared(ready.folder) is None, "one that is cut off is not used"
    assert prepare_objects("scenes", data_dir=tmp_path).fresh[0] == 10


def test_svhn_becomes_pictures(tmp_path: Path) -> None:
    made.put(tmp_path, "svhn")
    ready = prepare_objects("svhn", data_dir=tmp_path)
    images = ready.images()
    assert images.shape == (9, 3, 224, 224)
    assert images[2, :, 150, 150].tolist() == [3, 6, 9]
    assert not (ready.folder / "pictures.ppm").exists()
