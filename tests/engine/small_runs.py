"""A small run for the tests of the engine."""

from __future__ import annotations

from typing import Any

from selfless import (
    MAS,
    SLNID,
    Run,
)


def small(data: str, **changes: Any) -> Run:
    base = {"stream": data, "model": "mlp-12", "preserve": MAS(0.1), "sparsify": SLNID(1e-2), "epochs": 2, "batch": 50, "lr": 0.05}
    return Run(**(base | changes))
