"""The same work in an ordinary PyTorch loop: the base of every ratio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfless import functional
from selfless.bench.engine import Workload, mlp
from selfless.keeper import attach
from selfless.models import build, hidden_activations
from selfless.preserve import MAS
from selfless.sparsify import SLNID

Batches = list[tuple[Tensor, Tensor]]


def build_network(workload: Workload, device: torch.device) -> nn.Module:
    """Return the network of a workload on the device."""
    return build(workload.model, outputs=workload.outputs, input_shape=workload.shape, seed=0).to(device)


def random_samples(workload: Workload, samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random images (float) and labels of ten classes, on the device."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(samples, *workload.shape, generator=generator), torch.randint(10, (samples,), generator=generator)
    return x.to(device), y.to(device)


def random_batches(workload: Workload, samples: int, batch: int, device: torch.device) -> Batches:
    """Return `random_samples` in batches."""
    x, y = random_samples(workload, samples, device)
    return list(zip(x.split(batch), y.split(batch), strict=True))


class Loop:
    """Part of an epoch of one run: gather, model, cross-entropy, SLNID on the hidden layers, SGD with momentum, MAS; data on the device.

    implicit: MAS acts after each step, as in the engine; otherwise it is part of the loss. Ratios are taken to the faster of the two.
    """

    def __init__(self, workload: Workload, samples: int, batch: int, steps: int, device: torch.device, implicit: bool) -> None:
        self.batch, self.steps = batch, steps
        self.model = build_network(workload, device)
        self.keeper = attach(self.model, MAS(0.1), SLNID(1e-3), layers=list(hidden_activations(self.model)), check_finite=False)
        self.x, self.y = random_samples(workload, samples, device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        if implicit:
            self.keeper.anchor_with(self.optimizer)
        self.keeper.consolidate([(self.x[:batch], self.y[:batch])])

    def __call__(self) -> None:
        """Train `steps` steps."""
        order = torch.randperm(len(self.x), device=self.x.device)
        for rows in order.split(self.batch)[: self.steps]:
            loss = F.cross_entropy(self.model(self.x[rows])[:, :10], self.y[rows]) + self.keeper.penalty()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


def forward_backward(model: nn.Module, batches: Batches) -> None:
    """Run one epoch of forward and backward passes, without an optimizer."""
    for x, y in batches:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()


def loop_over_samples(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], power: int) -> list[Tensor]:
    """mean_m |∂L_m/∂θ|ᵖ in its simplest form: one forward and one backward pass per sample."""
    parameters = list(model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for m in range(len(x)):
        grads = torch.autograd.grad(loss(model(x[m : m + 1]), y[m : m + 1]), parameters)
        for t, g in zip(total, grads, strict=True):
            t += g.abs() if power == 1 else g.square()
    return [t / len(x) for t in total]


def make_step(n: int, batch: int, device: torch.device, alpha: Tensor | None = None) -> Callable[[], None]:
    """Return one SGD step of an MLP 784-N-N-10, with SLNID on both hidden layers if α (N,) is given."""
    make: dict[str, Any] = {"device": device}
    first, second, head = nn.Linear(784, n, **make), nn.Linear(n, n, **make), nn.Linear(n, 10, **make)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters(), *head.parameters()], lr=1e-3, momentum=0.9)
    x, y = random_samples(mlp(n), batch, device)
    x = x.flatten(1)

    def step() -> None:
        optimizer.zero_grad()
        h1 = first(x).relu()
        h2 = second(h1).relu()
        loss = F.cross_entropy(head(h2), y)
        if alpha is not None:
            loss = loss + 1e-6 * (functional.slnid(h1, alpha) + functional.slnid(h2, alpha))
        loss.backward()
        optimizer.step()

    return step
