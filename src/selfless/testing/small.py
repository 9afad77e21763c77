"""Small tasks and networks, on which a method is checked in seconds."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from selfless.data import Stream, from_arrays
from selfless.preserve import MAS
from selfless.sparsify import SLNID
from selfless.spec import Run


def small_arrays() -> dict[str, Any]:
    """Return three tasks of two classes, 6 × 6 pixels. A task has 130 training images: with batches of 50 the last one is smaller."""
    rng = np.random.Generator(np.random.PCG64(0))
    prototypes = rng.integers(0, 200, (6, 1, 6, 6))

    def draw(per_class: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        y = np.repeat(np.arange(6), per_class)
        return np.clip(prototypes[y] + rng.normal(0, 60, (len(y), 1, 6, 6)), 0, 255).astype(np.uint8), y

    (x, y), (xt, yt) = draw(65), draw(20)
    return {"x_train": x, "y_train": y, "x_test": xt, "y_test": yt, "task": y // 2, "task_test": yt // 2}


@lru_cache(maxsize=1)
def small_stream() -> Stream:
    """Return the stream of `small_arrays`."""
    return from_arrays(**small_arrays(), name="small")


def small_run(**changes: Any) -> Run:
    """Return a run of MAS and SLNID on `small_arrays`, with some settings changed."""
    base: dict[str, Any] = {"model": "mlp-12", "preserve": MAS(0.1), "sparsify": SLNID(1e-2), "epochs": 2, "batch": 50, "lr": 0.05}
    return Run(**{"stream": small_stream(), **base, **changes})


def small_net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a network of 5 inputs, two hidden layers and 3 outputs, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)


def small_task(seed: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """Return three random batches for `small_net`."""
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(16, 5, generator=g).to(dtype), torch.randint(0, 3, (16,), generator=g)) for _ in range(3)]
