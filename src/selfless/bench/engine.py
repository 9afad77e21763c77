"""The engine on synthetic images of the shape of MNIST, CIFAR and Tiny ImageNet: the real Learner and Fleet, without files."""

from __future__ import annotations

import contextlib
import dataclasses
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
class Workload:
    """A network and the stream that it learns."""

    model: str
    stream: str
    data: str
    shape: tuple[int, int, int]
    outputs: int
    classes_per_task: int = 10

    @property
    def title(self) -> str:
        return f"MLP 784-{self.width}-{self.width}-10" if self.model.startswith("mlp") else f"CIFAR network, FC {self.width}"

    @property
    def width(self) -> int:
        return int(self.model.split("-")[1])


def mlp(width: int = 128) -> Workload:
    """Permuted MNIST on an MLP with two hidden layers."""
    return Workload(f"mlp-{width}", "permuted-mnist", "mnist", (1, 28, 28), 10)


def cnn(width: int = 256) -> Workload:
    """Split CIFAR-100 on the network of Zenke et al."""
    return Workload(f"cnn-{width}", "split-cifar-100", "cifar-100", (3, 32, 32), 100)


def vgg() -> Workload:
    """Split Tiny ImageNet on the paper's network."""
    return Workload("vgg-slim", "split-tiny-imagenet", "tiny-imagenet", (3, 64, 64), 200, classes_per_task=20)


def small_images(workload: Workload) -> torch.Tensor:
    """Return 1,000 random images, with four fifths of the bytes 0 as in MNIST."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (1_000, *workload.shape), generator=generator, dtype=torch.uint8)
    return images.mul_(torch.rand(images.shape, generator=generator) < 0.2)


def synthetic_source(workload: Workload, samples: int) -> Source:
    """Return `samples` images per task: 1,000 random images, repeated; balanced classes."""
    images, classes, per_task = small_images(workload), workload.outputs, workload.classes_per_task

    def labelled(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return images[torch.arange(n) % len(images)], torch.arange(n) % classes

    mean, std = (MEAN, STD) if workload.data == "cifar-100" else (None, None)
    names = tuple(str(c) for c in range(classes))
    return Source(workload.data, labelled(samples * classes // per_task), labelled(classes), names, mean, std, classes_per_task=per_task)


class EngineFleet:
    """A fleet in the middle of a task, after `tasks_before` tasks. All tasks have the same images; what is learnt does not matter here.

    layers: hidden layers of an MLP. source: other images. budget: bytes of images to keep on the device; the others stay where they are.
    """

    def __init__(
        self,
        workload: Workload,
        members: int,
        samples: int,
        device: torch.device,
        *,
        preserve: Preserver | None = None,
        sparsify: Sparsifier | None = None,
        batch: int = 200,
        tasks_before: int = 1,
        layers: int = 2,
        source: Source | None = None,
        budget: int | None = None,
    ) -> None:
        preserve = MAS(0.1) if preserve is None else preserve
        sparsify = SLNID(1e-3) if sparsify is None else sparsify
        lr = 1e-3  # small enough that no measurement diverges
        run = Run(workload.stream, workload.model, preserve, sparsify, tasks=1, batch=batch, lr=lr)
        run = run if layers == 2 else dataclasses.replace(run, model_options={"layers": layers})
        runs = [dataclasses.replace(run, seed=seed) for seed in range(members)]
        data_dir = f"made-up/{samples}"  # a folder that does not exist: the images are offered under its name
        source = synthetic_source(workload, samples) if source is None else source
        offer(source, data_dir=data_dir)
        self.learner = Learner(runs, device=device, data_dir=data_dir)  # type: ignore[arg-type]  # only compared, never opened
        self.fleet, self.epochs, self.task = self.learner.fleet, 0, 0
        self.steps = math.ceil(samples / batch)
        self.data = FleetData([stream.tasks[0].train for stream in self.learner.streams], device, budget)
        self._begin_task()
        for _ in range(tasks_before):
            self.begin_next_task()

    def begin_next_task(self) -> None:
        """End the current task with its importance pass and begin another."""
        self.fleet.consolidate()
        self.task += 1
        self._begin_task()

    def train_epoch(self) -> None:
        """Train one epoch of the current task."""
        losses, _ = self.fleet.train_epoch(self.task, self.epochs)
        self.epochs += 1
        if not all(map(math.isfinite, losses)):
            raise RuntimeError(f"the loss on synthetic images became {losses}, so the times would mean nothing; please report this")

    def consolidate(self) -> None:
        """Run the importance pass. It ends the task: the fleet cannot train until another task begins."""
        self.fleet.consolidate()

    def _begin_task(self) -> None:
        stream = self.learner.streams[0]
        self.fleet.begin_task(self.data, stream.tasks[0].heads, stream.outputs)


@contextlib.contextmanager
def training_settings() -> Iterator[None]:
    """Use the default settings of `Learner.learn` (TF32, no denormal numbers) for everything inside, plain PyTorch included."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = True
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        matmul.allow_tf32, cudnn.allow_tf32 = before
