"""Data files: IDX, gzip, CIFAR, archives, MATLAB, .npz, images."""

from __future__ import annotations

import gzip
import io
import random
import shutil
import tarfile
import zipfile
from typing import Any

import numpy as np

from tests.fuzz.changes import change_bytes
from tests.fuzz.world import World, command


def idx(world: World, rng: random.Random) -> None:
    from selfless.data.sources import mnist

    images = b"\x00\x00\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (3, 4, 4)) + bytes(48)
    labels = b"\x00\x00\x08\x01" + (3).to_bytes(4, "big") + bytes([0, 1, 2])
    mnist.pair(change_bytes(images, rng), change_bytes(labels, rng) if rng.random() < 0.5 else labels, 10, "case")


def gz(world: World, rng: random.Random) -> None:
    from selfless.data.checksums import gunzip

    gunzip(change_bytes(gzip.compress(bytes(1000), mtime=0), rng), "case.gz")


def cifar(world: World, rng: random.Random) -> None:
    from selfless.data.sources import cifar as reader

    reader.parse(change_bytes(bytes(3074 * 2), rng) + (b"" if rng.random() < 0.5 else bytes(3074)), "case")


def archive(world: World, rng: random.Random) -> None:
    """A tar or zip with odd members, or changed bytes; nothing may be written beside the folder."""
    from selfless.data.archives import Tree, untar

    out = world.folder / "unpacked"
    shutil.rmtree(out, ignore_errors=True)
    names = [
        "train.bin",
        "a/train.bin",
        "../train.bin",
        "/tmp/train.bin",
        "..\\train.bin",
        "C:/train.bin",
        "a/../../train.bin",
        "top/x.txt",
    ]
    buffer = io.BytesIO()
    if rng.random() < 0.5:
        with tarfile.open(fileobj=buffer, mode=rng.choice(["w:gz", "w:xz", "w"])) as tar:
            for name in rng.sample(names, rng.randint(1, 3)):
                info = tarfile.TarInfo(name)
                info.type = rng.choice([tarfile.REGTYPE] * 3 + [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
                info.linkname = "/etc/passwd"
                info.size = 100 if info.type == tarfile.REGTYPE else 0
                tar.addfile(info, io.BytesIO(bytes(100)))
        data = buffer.getvalue()
        path = world.folder / "case.tar"
        path.write_bytes(change_bytes(data, rng) if rng.random() < 0.6 else data)
        untar(path, ["train.bin"], out / "inside")
    else:
        with zipfile.ZipFile(buffer, "w") as packed:
            for name in rng.sample(names, rng.randint(1, 3)):
                packed.writestr(name, bytes(100))
        data = buffer.getvalue()
        path = world.folder / "case.zip"
        path.write_bytes(change_bytes(data, rng) if rng.random() < 0.8 else data)
        with Tree(path, "top") as tree:
            for name in tree.names():
                tree.read(name)


def mat(world: World, rng: random.Random) -> None:
    from selfless.data.sources.objects import matlab

    matlab.read(change_bytes(_mat(), rng), ["labels", "names"], "case.mat")


def _mat() -> bytes:
    """Return a small MATLAB 5 file with a row of numbers called "labels"."""

    def element(kind: int, content: bytes) -> bytes:
        return kind.to_bytes(4, "little") + len(content).to_bytes(4, "little") + content + bytes(-len(content) % 8)

    body = element(6, (6).to_bytes(4, "little") + bytes(4)) + element(5, (1).to_bytes(4, "little") + (3).to_bytes(4, "little"))
    body += element(1, b"labels") + element(9, np.array([1.0, 2.0, 3.0]).tobytes())
    return b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM" + element(14, body)


def npz(world: World, rng: random.Random) -> None:
    from selfless.data import stream

    path = world.folder / "case.npz"
    if rng.random() < 0.5:
        path.write_bytes(change_bytes(world.npz, rng))
    else:
        arrays: dict[str, Any] = dict(np.load(world.folder / "tasks.npz"))
        name = rng.choice(list(arrays))
        odd = [
            np.zeros(0),
            np.full(60, np.nan),
            np.zeros((60, 0)),
            np.array("x"),
            np.arange(60) - 30,
            np.zeros((60, 1, 6, 6, 2)),
            np.full(60, 1e300),
        ]
        arrays[name] = rng.choice([*odd, arrays[name].astype(np.float64) * np.inf, arrays[name][:7], np.zeros(60, dtype=np.complex64)])
        if rng.random() < 0.3:
            del arrays[rng.choice(list(arrays))]
        np.savez(path, **arrays)
    stream(f"arrays:{path}")


def image(world: World, rng: random.Random) -> None:
    from selfless.data.images import decode_image

    decode_image(change_bytes(rng.choice([world.png, world.jpeg]), rng), (3, 8, 8), "case.png")


def picture(world: World, rng: random.Random) -> None:
    path = world.folder / "case.png"
    path.write_bytes(change_bytes(rng.choice([world.png, world.jpeg]), rng))
    command(["predict", str(world.place), str(path)])
