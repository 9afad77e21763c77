"""A Lightning module and two tasks, for the tests and for the program with two processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCHES = 2, 5
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Net(pl.LightningModule):  # type: ignore[misc]
    """A module with its own loss and optimizer, as people write them."""

    def __init__(self, make: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 16), nn.Linear(16, 3)
        self.make = make or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))

    def training_step(self, batch: Any, _: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def tasks() -> list[DataLoader[Any]]:
    generator = torch.Generator().manual_seed(0)
    sets = [TensorDataset(torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator)) for _ in range(2)]
    return [DataLoader(one, batch_size=8) for one in sets]


def build(kind: Any = Net, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(**options)
