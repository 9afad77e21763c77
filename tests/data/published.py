"""Make small data sets in their published layouts, for the tests."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from selfless.data.sources import cifar


def idx_bytes(array: np.ndarray) -> bytes:
    """Return the IDX file of an array of bytes."""
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def mnist_contents(n: int = 60, n_test: int = 20) -> dict[str, bytes]:
    """Return name → decompressed content of a small MNIST: 28 × 28, labels 0 … 9 in turn."""
    rng, made = np.random.Generator(np.random.PCG64(0)), {}
    for kind, count in (("train", n), ("t10k", n_test)):
        made[f"{kind}-images-idx3-ubyte"] = idx_bytes(rng.integers(0, 256, (count, 28, 28)))
        made[f"{kind}-labels-idx1-ubyte"] = idx_bytes(np.arange(count) % 10)
    return made


def cifar_contents(per_class: int = 2) -> dict[str, bytes]:
    """Return the three files of a small CIFAR-100 with all hundred classes."""
    rng, made = np.random.Generator(np.random.PCG64(1)), {}
    for name in ("train.bin", "test.bin"):
        table = rng.integers(0, 256, (100 * per_class, cifar.RECORD)).astype(np.uint8)
        table[:, 1] = np.arange(len(table)) % 100
        table[:, 0] = table[:, 1] // 5
        made[name] = table.tobytes()
    return {**made, "fine_label_names.txt": "\n".join(f"class{i:02d}" for i in range(100)).encode() + b"\n\n"}


def write_tar(path: Path, contents: dict[str, bytes], top: str = "cifar-100-binary/", link: str | None = None) -> Path:
    with tarfile.open(path, "w:xz" if path.suffix == ".xz" else "w:gz") as tar:
        for name, data in contents.items():
            info = tarfile.TarInfo(top + name)
            if name == link:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
                tar.addfile(info)
                continue
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def jpeg(seed: int, size: tuple[int, int] = (64, 64), mode: str = "RGB") -> bytes:
    """Return a smooth picture, which compression hardly changes; seeds differ in colour."""
    rng, out = np.random.Generator(np.random.PCG64(seed)), io.BytesIO()
    small = rng.integers(0, 256, (2, 2, 3)).astype(np.uint8)
    Image.fromarray(small).resize(size, Image.Resampling.BILINEAR).convert(mode).save(out, "JPEG", quality=95)
    return out.getvalue()


def tiny_contents(classes: int = 4, train: int = 3, test: int = 2) -> dict[str, bytes]:
    """Return a small Tiny ImageNet in its original layout; one image is grey and one has another size."""
    wnids = [f"n{i:08d}" for i in range(classes)]
    made = {
        "wnids.txt": ("\n".join(wnids) + "\n").encode(),
        "words.txt": "".join(f"{w}\tthing {i}, other name\n" for i, w in enumerate(wnids)).encode(),
    }
    notes = []
    for c, wnid in enumerate(wnids):
        for i in range(train):
            odd = {"mode": "L"} if (c, i) == (0, 0) else {"size": (80, 50)} if (c, i) == (1, 1) else {}
            made[f"train/{wnid}/images/{wnid}_{i}.JPEG"] = jpeg(100 * c + i, **odd)  # type: ignore[arg-type]
        made[f"train/{wnid}/{wnid}_boxes.txt"] = b"boxes\n"
        for i in range(test):
            notes.append(f"val_{c * test + i}.JPEG\t{wnid}\t0\t0\t9\t9\n")
            made[f"val/images/val_{c * test + i}.JPEG"] = jpeg(5000 + 100 * c + i)
    return {**made, "val/val_annotations.txt": "".join(notes).encode(), "test/images/test_0.JPEG": jpeg(9)}


def write_zip(path: Path, contents: dict[str, bytes], top: str = "tiny-imagenet-200/") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(top + name, data)
    return path
