"""A small Part with random images, for the tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from selfless.data import Part


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def part(n: int = 50, shape: tuple[int, int, int] = (3, 8, 8), **change: object) -> Part:
    images = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=rng())
    made = Part(images, torch.arange(n) % 7, torch.randperm(n, generator=rng(1))[: n - 10])
    return replace(made, **change)  # type: ignore[arg-type]
