"""A network with a head for each task, its data, and a loop that trains it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Heads(nn.Module):
    """Shared layers and a head for each task."""

    def __init__(self, tasks: int = 3, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(16, classes) for _ in range(tasks)])

    def forward(self, x: Tensor, task: int) -> Tensor:
        out: Tensor = self.heads[task](self.body(x))
        return out


NAMES = ["heads.0", "heads.1", "heads.2"]


def made(dtype: torch.dtype = torch.float32) -> Heads:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Heads().to(dtype)


def data(task: int, count: int = 5, size: int = 20) -> list[tuple[Tensor, Tensor]]:
    """Labels that can be learnt: the largest of three sums, other ones for each task."""
    g = torch.Generator().manual_seed(task)
    rotation = torch.randn(6, 3, generator=g)
    return [(x, (x @ rotation).argmax(1)) for x in (torch.randn(size, 6, generator=g) for _ in range(count))]


def learn(model: nn.Module, keeper: Any, t: int, epochs: int = 6, optimizer: Any = None, **more: Any) -> None:
    opt = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **more)
    for epoch in range(epochs):
        keeper.begin_epoch(epoch, epochs, batches=len(data(t)))
        for x, y in data(t):
            loss = F.cross_entropy(model(x, t), y) + keeper.penalty((x, y))
            opt.zero_grad()
            loss.backward()
            opt.step()
    keeper.consolidate(data(t), forward=lambda m, b, t=t: m(b[0], t))


def accuracy(model: nn.Module, t: int) -> float:
    with torch.no_grad():
        return float(torch.cat([(model(x, t).argmax(1) == y).float() for x, y in data(t)]).mean())


class Small(nn.Module):
    """A convolution and a linear layer with nodes, activations as functions, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.head = nn.Conv2d(1, 3, 3), nn.Linear(12, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.fc(F.relu(self.conv(x)).flatten(1))))
        return out
