"""The limit of this machine for a piece of work: its matrix products alone, and a copy of as many bytes as it must move.

A row of the benchmark says `of_limit` = seconds of the limit / seconds of the work, from the same rounds. It falls when the code gets
slower, whatever the speed of the machine. It exceeds 1 where the work uses larger batches or faster layouts than these products: an
importance pass of the engine reads up to 1,000 samples at a time, its limit is measured with those of a training batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfless.bench.engine import Workload
from selfless.models import build

Limit = Callable[[], None]
UPDATE = 7  # numbers that an update moves per parameter: it reads θ, u, the gradient, Ω and θ*, and writes θ and u


@dataclass(frozen=True)
class Product:
    """A layer as a matrix product, (rows, inputs) × (inputs, outputs); a convolution has a row for each position."""

    rows: int
    inputs: int
    outputs: int
    is_first: bool  # no gradient goes to the input of the network
    parameters: int


def products_of(workload: Workload, batch: int) -> list[Product]:
    """Return the products of a forward pass over one batch, layer by layer."""
    model, found = build(workload.model, outputs=workload.outputs, input_shape=workload.shape, seed=0), list[Product]()

    def read(layer: nn.Module, _: Any, output: Tensor) -> None:
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor)
        rows, size = batch * output.numel() // len(weight), weight.numel() + (0 if bias is None else len(weight))
        found.append(Product(rows, weight[0].numel(), len(weight), not found, size))

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    handles = [layer.register_forward_hook(read) for layer in layers]
    with torch.no_grad():
        model(torch.zeros(1, *workload.shape))
    for handle in handles:
        handle.remove()
    return found


def limit_of(workload: Workload, members: int, batch: int, device: torch.device, updates: bool = True) -> Limit:
    """Return a function that takes as long as one step of `members` runs at the limit; without `updates`, as long as its two passes."""
    products = products_of(workload, batch)
    calls = [call for product in products for call in _calls(product, members, device)]
    if updates:
        calls.append(copy_of(UPDATE * members * sum(product.parameters for product in products), device))

    def limit() -> None:
        for call in calls:
            call()

    return limit


def copy_of(numbers: int, device: torch.device) -> Limit:
    """Return a function that moves so many float32 numbers: it reads half of them and writes the other half."""
    source, target = (torch.ones(max(1, numbers // 2), device=device) for _ in range(2))

    def copy() -> None:
        target.copy_(source)

    return copy


def _calls(p: Product, members: int, device: torch.device) -> list[Limit]:
    """Return the forward product, that of the gradient of the weights, and that of the input unless the layer is the first.

    The members of a fleet are one batched product where a layer has one row per sample; a convolution is computed member by member.
    """
    generator = torch.Generator(device).manual_seed(0)
    stacked = members if p.rows * p.inputs * members < 2**26 else 1

    def draw(*shape: int) -> Tensor:
        return torch.rand(stacked, *shape, device=device, generator=generator)

    a, w, g = draw(p.rows, p.inputs), draw(p.inputs, p.outputs), draw(p.rows, p.outputs)
    pairs = [(a, w), (a.mT, g)] if p.is_first else [(a, w), (a.mT, g), (g, w.mT)]
    outputs = [torch.bmm(x, y) for x, y in pairs]

    def call() -> None:
        for _ in range(members // stacked):
            for (x, y), out in zip(pairs, outputs, strict=True):
                torch.bmm(x, y, out=out)

    return [call]
