"""The engine at work on made-up images of MNIST's and of CIFAR's shape: the real Learner and Fleet, and no files."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from selfless.data import Source, offer
from selfless.data.sources.cifar import MEAN, STD
from selfless.engine.batches import FleetData
from selfless.engine.learner import Learner
from selfless.preserve import MAS, Preserver
from selfless.sparsify import SLNID, Sparsifier
from selfless.spec import Run


@dataclass(frozen=True)
class Network:
    """A network and the stream it learns: ten classes a task."""

    model: str
    stream: str
    data: str
    shape: tuple[int, int, int]
    outputs: int

    @property
    def title(self) -> str:
        return f"MLP 784-{self.width}-{self.width}-10" if self.model.startswith("mlp") else f"CIFAR network, FC {self.width}"

    @property
    def width(self) -> int:
        return int(self.model.split("-")[1])


def mlp(width: int = 128) -> Network:
    return Network(f"mlp-{width}", "permuted-mnist", "mnist", (1, 28, 28), 10)


def cnn(width: int = 256) -> Network:
    return Network(f"cnn-{width}", "split-cifar-100", "cifar-100", (3, 32, 32), 100)


def made_up(network: Network, samples: int) -> Source:
    """A thousand random images over and over, four fifths of their bytes 0 as in MNIST: `samples` a task, as many of each class."""
    generator = torch.Generator().manual_seed(0)
    block = torch.randint(0, 256, (1_000, *network.shape), generator=generator, dtype=torch.uint8)
    block *= torch.rand(block.shape, generator=generator) < 0.2
    classes = network.outputs

    def half(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return block[torch.arange(n) % len(block)], torch.arange(n) % classes

    mean, std = (MEAN, STD) if network.data == "cifar-100" else (None, None)
    names = tuple(str(c) for c in range(classes))
    return Source(network.data, half(samples * classes // 10), half(classes), names, mean, std, classes_per_task=10)


class Rig:
    """A fleet in the middle of a task, with `learned` tasks behind it (all on the same images: what is learnt does not matter here)."""

    def __init__(
        self,
        network: Network,
        members: int,
        samples: int,
        device: torch.device,
        *,
        preserve: Preserver | None = None,
        sparsify: Sparsifier | None = None,
        batch: int = 200,
        learned: int = 1,
    ) -> None:
        preserve = MAS(0.1) if preserve is None else preserve
        sparsify = SLNID(1e-3) if sparsify is None else sparsify
        runs = [
            Run(
                network.stream, network.model, preserve, sparsify, tasks=1, batch=batch, lr=1e-3, seed=seed
            )  # a rate that nothing diverges at
            for seed in range(members)
        ]
        nowhere = f"made-up/{samples}"
        source = made_up(network, samples)
        offer(source, data_dir=nowhere)
        self.learner = Learner(runs, device=device, data_dir=nowhere)  # type: ignore[arg-type]  # a name is a place
        self.fleet, self.epochs, self.task = self.learner.fleet, 0, 0
        self.steps = math.ceil(samples / batch)
        self.data = FleetData([stream.tasks[0].train for stream in self.learner.streams], device)
        self.begin()
        for _ in range(learned):
            self.next()

    def begin(self) -> None:
        first = self.learner.streams[0]
        self.fleet.begin_task(self.data, first.tasks[0].heads, first.outputs)

    def next(self) -> None:
        """The task is over; on to another."""
        self.fleet.consolidate()
        self.task += 1
        self.begin()

    def epoch(self) -> None:
        losses, _ = self.fleet.train_epoch(self.task, self.epochs)
        self.epochs += 1
        if not all(map(math.isfinite, losses)):
            raise RuntimeError(f"the loss on made-up data became {losses}: the figures would mean nothing; please report this")

    def consolidate(self) -> None:
        """The importance pass; a fleet that has made one does not train on until `begin`."""
        self.fleet.consolidate()


@contextlib.contextmanager
def as_in_a_run() -> Iterator[None]:
    """The settings that `Learner.learn` trains with by default, for everything that is measured inside: plain PyTorch gets them too."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = True
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        matmul.allow_tf32, cudnn.allow_tf32 = before
