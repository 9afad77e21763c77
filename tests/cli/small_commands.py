"""A small `selfless run` for the tests of the command line."""

from __future__ import annotations

from pathlib import Path


def small(stream: str, out: Path, *more: str) -> list[str]:
    return ["run", "--stream", stream, "--model", "mlp-12", "--epochs", "2", "--batch", "50", "--lr", "0.05", "--out", str(out), *more]
