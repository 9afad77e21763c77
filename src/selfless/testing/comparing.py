"""What the laws share: how a broken law is told, how two tensors are compared, a method at another strength, a small loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfless.keeper import Keeper

ROUNDING = 1e-5  # float32, after three tasks of six steps


class Broken(AssertionError):
    """How a method breaks a law, with the remedy."""


def same(what: str, found: Tensor, wanted: Tensor, within: float = 0.0) -> None:
    """Raise Broken unless the two are equal up to rounding, or to `within`."""
    found, wanted = found.double(), wanted.double()
    if not torch.allclose(found, wanted, rtol=1e-4 if within else 1e-3, atol=max(ROUNDING, within)):
        raise Broken(f"{what} differs by {(found - wanted).abs().max().item():.2g}, of {wanted.abs().max().item():.2g} at most")


def descends(cost: Callable[[dict[str, Tensor]], Tensor], at: Mapping[str, Tensor]) -> None:
    """Raise Broken if a small step against the gradient of a penalty makes it larger."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in at.items()}
    value = cost(leaves)
    if not value.requires_grad:
        return
    grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    found = {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}
    largest = max((float(g.abs().max()) for g in found.values()), default=0.0)
    if not 0 < largest < math.inf:
        return
    after = {name: t.detach() - 1e-3 / largest * found[name] if name in found else t.detach() for name, t in leaves.items()}
    if float(cost(after)) > float(value):
        raise Broken("a small step against its gradient makes penalty() larger; is the backward() of a function wrong, as its sign?")


def at_strength(term: Any, strength: float) -> Any:
    """Return a method at a strength, or as it is if it does not take that one: a share may not be above 1."""
    try:
        return term.with_strength(strength)
    except ValueError:
        return term


def learn(model: nn.Module, keeper: Keeper, data: Sequence[tuple[Tensor, Tensor]], implicit: bool = True, epochs: int = 2) -> None:
    """Train a small task in a plain loop, and consolidate it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if implicit:
        keeper.anchor_with(optimizer)
    for epoch in range(epochs):
        keeper.begin_epoch(epoch, epochs, batches=len(data))
        for x, y in data:
            loss = F.cross_entropy(model(x), y) + keeper.penalty((x, y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    keeper.consolidate(data)


def name_of(dtype: torch.dtype) -> str:
    """Return its name without the word torch."""
    return str(dtype).removeprefix("torch.")
