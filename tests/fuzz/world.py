"""The world of the cases: small data, modules, a recorded run; commands that end after their check; the judgement of messages."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import typer
from typer.testing import CliRunner

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


Target = Callable[[World, random.Random], None]
