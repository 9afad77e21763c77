"""Small runs of three tasks, one for each preserver, trained once for all tests of a process."""

from __future__ import annotations

import functools
from typing import Any

import selfless
from selfless import Result, Run

BASE: dict[str, Any] = {"model": "mlp-12", "sparsify": "slnid:1e-2", "epochs": 2, "batch": 50, "lr": 0.05}


@functools.cache
def whole(stream: str, preserve: str) -> Result:
    """Return the result of a run over all tasks of a stream, with its weights in memory."""
    return selfless.train(Run(stream=stream, preserve=preserve, **BASE))
