"""Small runs for the tests of the runner, as values and as commands."""

from __future__ import annotations

import sys
from typing import Any

from selfless import MAS, SLNID

BASE: dict[str, Any] = {"model": "mlp-12", "preserve": MAS(0.1), "sparsify": SLNID(1e-2), "epochs": 2, "batch": 50, "lr": 0.05}


def command(*words: str) -> list[str]:
    """The command line in a process of its own."""
    return [sys.executable, "-m", "selfless", *words]


def flags(data: str, epochs: int) -> list[str]:
    """A run of 39 steps an epoch, 13 in each task."""
    words = ["run", "--stream", data, "--model", "mlp-12", "--sparsify", "slnid:1e-2", "--batch", "10", "--lr", "0.05"]
    return [*words, "--epochs", str(epochs)]


NET = """from torch import nn
def build(outputs, input_shape):
    print("hello")
    return nn.Sequential(nn.Flatten(), nn.Linear(36, {0}), nn.ReLU(), nn.Linear({0}, outputs))
"""


def stopping(after: int) -> Any:
    """A `watch` that stops training, as Ctrl-C does, after so many events."""
    seen = 0

    def watch(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == after:
            raise KeyboardInterrupt

    return watch
