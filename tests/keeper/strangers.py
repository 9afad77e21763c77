"""A network, its data and a plain loop, for tests of loops that no example has."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selfless

Batch = tuple[Tensor, Tensor]


def data(seed: int = 0, count: int = 3) -> list[Batch]:
    torch.manual_seed(seed)
    return [(torch.randn(8, 5), torch.randint(3, (8,))) for _ in range(count)]


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 3))


def train(model: nn.Module, keeper: selfless.Keeper, batches: list[Batch], optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    for x, y in batches:
        loss = F.cross_entropy(model(x), y) + keeper.penalty((x, y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
