"""The random numbers that networks draw in training passes, such as dropout: each member of a fleet draws its own.

They depend on (seed, task, epoch) of the member, as they do if it trains alone, and not on the other members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Draws:
    """One generator for each member. Inside `with draws.member(m)` the default generator of the device draws the numbers of member m.

    So `nn.Dropout`, `F.dropout`, `torch.rand_like` and all others draw what they draw if the member trains alone. A captured step reads
    the seed and the position of each generator at every replay (`selfless.engine.cuda_graph`).
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.generators = [torch.Generator(device) for _ in range(count)]

    def seed(self, seeds: Sequence[int]) -> None:
        """Start the numbers of an epoch."""
        for generator, seed in zip(self.generators, seeds, strict=True):
            generator.manual_seed(seed)

    @contextmanager
    def member(self, m: int) -> Iterator[None]:
        """Inside `with`: the default generator draws for member m."""
        own = self.generators[m]
        default = default_generator(own.device)
        if own.device.type == "cuda":
            before = default.graphsafe_get_state()
            default.graphsafe_set_state(own)
            try:
                yield
            finally:
                default.graphsafe_set_state(before)
        else:
            state = default.get_state()
            default.set_state(own.get_state())
            try:
                yield
            finally:
                own.set_state(default.get_state())
                default.set_state(state)

    def by_member(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return function(x[m]) of every member, stacked; each draws its own numbers."""
        found = []
        for m, own in enumerate(x.unbind()):
            with self.member(m):
                found.append(function(own))
        return torch.stack(found)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that functions on this device use if they are not given one."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def draws_in_training(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return True if a training pass of this module, which is on the CPU, draws random numbers."""
    module.train()
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        torch.func.functional_call(module, buffers, (torch.zeros(2, *shape),))
        return not torch.equal(before, torch.get_rng_state())
