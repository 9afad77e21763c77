"""Networks, batches and a plain training loop for the tests of the keeper."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """Activations as functions: the commonest way to write an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(6, 16), nn.Linear(16, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x))
        return self.head(torch.relu(self.fc2(x)))


def sequential(inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace), nn.Linear(16, 12), nn.ReLU(inplace), nn.Linear(12, 3))


def seeded(build: Any = Net, seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def batches(seed: int = 0, count: int = 4, size: int = 20) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 6, generator=g), torch.randint(0, 3, (size,), generator=g)) for _ in range(count)]


def train(model: nn.Module, keeper: Any, optimizer: torch.optim.Optimizer, data: Any, epochs: int = 3) -> None:
    for _ in range(epochs):
        for x, y in data:
            loss = F.cross_entropy(model(x), y) + keeper.penalty()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
