"""What is fuzzed: each function makes one case from a seeded generator and hands it to the package as a user would.

Nothing is trained: `selfless run` and `tune` end after the check of their runs.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import typer
from typer.testing import CliRunner

from tests.fuzz.changes import VALUES, WORDS, change_bytes, change_json, change_text

RESULTS = Path(__file__).resolve().parents[2] / "results"
runner = CliRunner()
SPECS = [
    *("mas:0.1", "ewc:10,alpha=function", "si:1", "lwf:1+mas:0.1", "ebll:0.5,steps=10", "rwalk:0.5,every=10", "packnet:0.5", "hat:0.75"),
    *("imm:0.1", "replay:1,samples=20", "der:1", "finetune", "mas:auto", "mine:Close:0.1", "slnid:1e-3,sigma=4", "decov:1e-3+slnid:1e-3"),
]
MODELS = ["mlp-8", "mlp-8-maxout", "mlp-8-lwta", "cnn-8", "vgg-slim", "alexnet", "mine:build", "mine:broken", "wrong:build", "raises:build"]
MODULES = {
    "mine.py": "from torch import nn\n"
    "def build(outputs, input_shape): return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, outputs))\n"
    "def broken(outputs): raise KeyError('mine')\n",
    "wrong.py": "def build(:\n",
    "raises.py": "1 / 0\n",
}


class World:
    """A folder with small data, modules, a recorded run and a recorded experiment, shared by all cases."""

    def __init__(self, folder: Path) -> None:
        from selfless import Run, train

        self.folder = folder
        for name, text in MODULES.items():
            (folder / name).write_text(text)
        rng = np.random.default_rng(0)
        y = np.repeat(np.arange(6), 10)
        x = rng.integers(0, 255, (60, 1, 6, 6)).astype(np.uint8)
        np.savez(folder / "tasks.npz", x_train=x, y_train=y, x_test=x[::2], y_test=y[::2], task=y // 2, task_test=y[::2] // 2)
        self.stream = f"arrays:{folder / 'tasks.npz'}"
        self.run = Run(stream=self.stream, model="mlp-8", epochs=1, batch=30, tasks=2)
        train(self.run, out=folder / "results", workers=1)
        self.place = folder / "results" / self.run.key
        self.record = json.loads((self.place / "metrics.json").read_text())
        experiment = json.loads((RESULTS / "reproduction/experiments/fig-2-ours.json").read_text())
        self.experiment = experiment | {
            "cells": experiment["cells"][:3],
            "choices": experiment["choices"][:2],
            "claims": experiment["claims"][:2],
        }
        self.tensors = (self.place / "checkpoint.safetensors").read_bytes()
        self.npz = (folder / "tasks.npz").read_bytes()
        picture = io.BytesIO()
        from PIL import Image

        Image.fromarray(x[0, 0]).resize((16, 16)).save(picture, "PNG")
        self.png = picture.getvalue()
        picture = io.BytesIO()
        Image.fromarray(x[0, 0]).resize((16, 16)).save(picture, "JPEG")
        self.jpeg = picture.getvalue()


@contextmanager
def not_training() -> Iterator[None]:
    """Inside `with`: commands that train check their runs and end."""
    import dataclasses

    from selfless.cli import run, tune
    from selfless.runner.checks import check_runs
    from selfless.runner.machine import resolve_device

    def check(runs: Any, options: Any, *, as_json: bool) -> Any:
        check_runs(runs, dataclasses.replace(options, device=resolve_device(options.device)))
        raise typer.Exit(0)

    before = run.train_with_progress, tune.train_with_progress
    run.train_with_progress = tune.train_with_progress = check
    try:
        yield
    finally:
        run.train_with_progress, tune.train_with_progress = before


def command(words: list[str]) -> None:
    """Call the command line in this process; raise what it would show as a traceback."""
    from selfless.cli import app

    done = runner.invoke(app, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise Traceback(f"selfless {words}") from done.exception
    complain(done.output)


class Traceback(Exception):
    """An error that a user would see as a traceback."""


class Vague(Exception):
    """A message that only its author understands."""


UNCLEAR = (
    *(
        "object has no attribute",
        "division by zero",
        "index out of range",
        "invalid literal for",
        "unexpected keyword",
        "positional argument",
    ),
    *(
        "unhashable",
        "not supported between",
        "unsupported operand",
        "object is not",
        "indices must be",
        "Traceback",
        "NoneType",
        "not enough values",
    ),
    *(
        "could not be broadcast",
        "too many values",
        "must be real number",
        "cannot be interpreted as",
        "math domain",
        "Expected all tensors",
    ),
)


def complain(message: str) -> None:
    """Raise Vague for a message in Python's own words."""
    for words in UNCLEAR:
        if words in message and "mine" not in message and "raises" not in message:
            raise Vague(message.strip()[-600:])


# --------------------------------------------------------------------------------------------------------------------- texts
def spec(world: World, rng: random.Random) -> None:
    """A run from changed texts: its terms, its network, its stream."""
    from selfless import Run
    from selfless.runner.checks import check_runs
    from selfless.runner.options import TrainOptions

    fields: dict[str, Any] = {"stream": world.stream, "model": "mlp-8", "tasks": 2}
    for name in rng.sample(
        ["preserve", "sparsify", "model", "stream", "tasks", "epochs", "lr", "select", "seed", "outputs"], rng.randint(1, 3)
    ):
        if name in ("preserve", "sparsify"):
            fields[name] = rng.choice(SPECS) if rng.random() < 0.3 else change_text(rng.choice(SPECS), rng)
        elif name in ("model", "stream"):
            start = rng.choice(
                MODELS if name == "model" else [world.stream, "permuted-mnist", "split-cifar-100", "folders:x", "objects:flowers"]
            )
            fields[name] = start if rng.random() < 0.3 else change_text(start, rng)
        else:
            fields[name] = rng.choice(VALUES)
    made = Run(**fields)
    assert len(made.key) == 16
    if made.stream == world.stream:
        check_runs([made], TrainOptions(device="cpu"))


def toml(world: World, rng: random.Random) -> None:
    """A TOML file with changed values, keys or characters."""
    import dataclasses

    from selfless import Run

    names = [f.name for f in dataclasses.fields(Run)] + ["seeds", "out", "device", "workers", "data_dir", "budget", "checkpoints"]
    values = [
        *WORDS,
        "true",
        "1",
        "1.5",
        "1e300",
        "[1, 2]",
        "{a = 1}",
        "1979-05-27",
        "07:32:00",
        "[[1]]",
        '"x"',
        "'permuted-mnist'",
        "-5",
        "1e9",
    ]
    lines = [f"stream = {world.stream!r}", "model = 'mlp-8'", "tasks = 2"]
    for _ in range(rng.randint(1, 3)):
        value = rng.choice(values)
        lines.append(f"{rng.choice(names)} = {value if rng.random() < 0.7 else json.dumps(value)}")
    text = "\n".join(rng.sample(lines, len(lines)))
    path = world.folder / "case.toml"
    path.write_text(change_text(text, rng) if rng.random() < 0.3 else text, encoding="utf-8", errors="surrogatepass")
    with not_training():
        command(["run", "--config", str(path), *(["--json"] if rng.random() < 0.3 else [])])


def flags(world: World, rng: random.Random) -> None:
    """A command line with odd values."""
    import dataclasses

    from selfless import Run

    known = [f.metadata["option"].flag or f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(Run)]
    known += [
        "--seeds",
        "--out",
        "--device",
        "--workers",
        "--data-dir",
        "--budget",
        "--engine",
        "--config",
        "--stream-option",
        "--model-option",
    ]
    values = [
        *WORDS,
        *SPECS,
        *MODELS,
        "cpu",
        "cuda:99",
        "x",
        "2GB",
        "1e400",
        "1e9",
        "5",
        "0.5",
        "classes_per_task=0",
        "p=nan",
        "layers=1e9",
        "kind=split",
    ]
    words = ["run", "--stream", world.stream, "--model", "mlp-8", "--tasks", "2"]
    if rng.random() < 0.15:
        known, words = (
            ["--stream", "--model", "--sparsify", "--strengths", "--tolerance", "--epochs", "--lr", "--limit", "--device"],
            ["tune"],
        )
        words += ["--stream", world.stream, "--model", "mlp-8"]
    if rng.random() < 0.15:
        place = rng.choice([str(world.place), str(world.folder / "results"), rng.choice(WORDS), str(world.folder)])
        words = [rng.choice(["report", "capacity", "predict", "export", "watch", "results"]), place]
        known = ["--format", "--to", "--task", "--json", "--once", "--against", "--figures"]
        words += ["--once"] if words[0] == "watch" else []
    for _ in range(rng.randint(1, 3)):
        value = rng.choice(values)
        words += [rng.choice(known), change_text(value, rng) if rng.random() < 0.3 else value]
    words = [word.replace("\x00", "") for word in words]
    if any(flag in words for flag in ("--to", "--figures")) or "\x00" in "".join(words):
        words = [word for word in words if word not in ("--to", "--figures")]
    with not_training():
        command(words)


# --------------------------------------------------------------------------------------------------------------------- files
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


# ------------------------------------------------------------------------------------------------------------------- records
def checkpoint(world: World, rng: random.Random) -> None:
    """A recorded network with changed bytes."""
    import selfless

    place = _copy(world, rng)
    (place / "checkpoint.safetensors").write_bytes(change_bytes(world.tensors, rng))
    selfless.load(place).model()


def record(world: World, rng: random.Random) -> None:
    """A record with changed values or characters, read by every command that reads records."""
    place = _copy(world, rng)
    if rng.random() < 0.7:
        plain = {key: value for key, value in world.record.items() if key != "sha256"}  # otherwise the checksum finds every change
        (place / "metrics.json").write_text(json.dumps(change_json(plain, rng)), encoding="utf-8", errors="surrogatepass")
    else:
        (place / "metrics.json").write_bytes(change_bytes(json.dumps(world.record).encode(), rng))
    folder = str(place.parent)
    choices = [
        ["report", folder, "--format", "md"],
        ["report", folder, "--format", "csv"],
        ["capacity", folder],
        ["watch", folder, "--once"],
    ]
    choices += [["run", "--stream", world.stream, "--model", "mlp-8", "--epochs", "1", "--batch", "30", "--tasks", "2", "--out", folder]]
    choices += [["results", "pack", folder], ["capacity", folder, "--json"], ["predict", str(place), str(world.folder / "none.png")]]
    with not_training():
        command(rng.choice(choices))


def experiment(world: World, rng: random.Random) -> None:
    folder = world.folder / "study"
    (folder / "experiments").mkdir(parents=True, exist_ok=True)
    text = json.dumps(change_json(world.experiment, rng))
    (folder / "experiments" / "fig-2-ours.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    command(["report", str(folder), "--format", rng.choice(["md", "csv", "latex"])])


def folder(world: World, rng: random.Random) -> None:
    """A folder of results with odd notes, logs and archives."""
    place = _copy(world, rng)
    note = {
        "host": "a",
        "process": 1,
        "updated": 1e9,
        "started": 1e9,
        "runs": [{"key": "k", "method": "m", "stream": "s", "model": "n", "seed": 0}],
    }
    event = {"average": [], "speed": 1.0, "share": 0.5, "seconds_left": 1.0, "task": 0, "tasks": 2}
    (place.parent / "study-a-1-0.json").write_text(json.dumps(change_json(note, rng)), errors="surrogatepass")
    (place / "training-0.json").write_text(json.dumps(change_json(note | {"event": event, "updated": 4e9}, rng)), errors="surrogatepass")
    (place / "log.jsonl").write_bytes(change_bytes(b'{"task": 1, "epoch": 1}\n', rng))
    (place.parent / "runs.jsonl.xz").write_bytes(change_bytes(b"\xfd7zXZ\x00" + bytes(60), rng)) if rng.random() < 0.2 else None
    if rng.random() < 0.3:
        (place / "metrics.json").unlink()
    command(
        rng.choice(
            [["watch", str(place.parent), "--once"], ["report", str(place.parent), "--format", "md"], ["capacity", str(place.parent)]]
        )
    )


def _copy(world: World, rng: random.Random) -> Path:
    """Return the folder of the recorded run in a fresh copy of its results."""
    out = world.folder / "copy"
    shutil.rmtree(out, ignore_errors=True)
    (out / world.run.key).mkdir(parents=True)
    for name in ("metrics.json", "spec.json", "checkpoint.safetensors"):
        shutil.copyfile(world.place / name, out / world.run.key / name)
    return out / world.run.key


Target = Callable[[World, random.Random], None]
TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (spec, toml, flags, idx, gz, cifar, archive, mat, npz, image, picture, checkpoint, record, experiment, folder)
}
