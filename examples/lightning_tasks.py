"""A Lightning module learns three tasks, one `fit` each: alone, and with MAS and SLNID from a callback.

The module and the trainer know nothing of continual learning: the callback adds the gradients of both terms, anchors the optimizer, and
measures importances when a fit ends.

    pip install 'selfless-learning[lightning]'
    python examples/lightning_tasks.py

This is a demonstration, not evidence: the strengths were chosen on these tasks.
"""

import logging
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from selfless import MAS, SLNID
from selfless.integrations.lightning import SelflessCallback

TASKS, CLASSES, SIZE, EPOCHS = 3, 4, 16, 6


class Classifier(pl.LightningModule):
    """Somebody's module, as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(SIZE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def make_tasks() -> list[tuple[TensorDataset, TensorDataset]]:
    """Four clouds of points; each task rotates them in another way."""
    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(CLASSES, SIZE, generator=generator)
    tasks = []
    for _ in range(TASKS):
        turned = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator))[0]
        labels = torch.arange(1200) % CLASSES
        x = (centres[labels] + torch.randn(1200, SIZE, generator=generator)) @ turned
        tasks.append((TensorDataset(x[:1000], labels[:1000]), TensorDataset(x[1000:], labels[1000:])))
    return tasks


@torch.no_grad()
def accuracy(module: nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    return float((module(x).argmax(1) == y).float().mean())


def main() -> dict[str, float]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    tasks, found = make_tasks(), {}
    for name, callback in (("plain", None), ("MAS + SLNID", SelflessCallback(MAS(1.0), SLNID(1e-3)))):
        pl.seed_everything(0, verbose=False)
        module = Classifier()
        for train, _ in tasks:
            trainer = pl.Trainer(
                max_epochs=EPOCHS,
                callbacks=[] if callback is None else [callback],
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(module, DataLoader(train, batch_size=50, shuffle=True))
        scores = [accuracy(module, test) for _, test in tasks]
        found[name] = sum(scores) / TASKS
        print(f"{name:12} accuracy by task after the last: {', '.join(f'{s:.0%}' for s in scores)}; average {found[name]:.1%}")
        if callback is not None:
            print(callback.keeper.capacity())
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
