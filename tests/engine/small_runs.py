"""What tests of the engine share: a small run, and the mark of those that need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfless import (
    MAS,
    SLNID,
    Run,
)

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def small(data: str, **changes: Any) -> Run:
    base = {"stream": data, "model": "mlp-12", "preserve": MAS(0.1), "sparsify": SLNID(1e-2), "epochs": 2, "batch": 50, "lr": 0.05}
    return Run(**(base | changes))
