"""A training step as a CUDA graph: recorded once, replayed from then on, at the price of one launch.

A recording holds addresses, not values. So a step may only read and write tensors that were there before it and stay there, and read
nothing back into Python; what it makes for itself lives in the graph. Whoever replaces such a tensor drops the recording.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def record(step: Callable[[], object], rewind: Callable[[], object], changed: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
    """The step as a graph. Recording changes nothing, draws included: it takes two steps to warm up, each after a `rewind`, and undoes
    them."""
    drawn = torch.cuda.get_rng_state()
    with undone(changed):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                rewind()
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.graph(graph):
            step()
    torch.cuda.set_rng_state(drawn)
    return graph


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is collected: an old graph that dies while a new one is recorded spoils the recording."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def undone(changed: Sequence[Tensor]) -> Iterator[None]:
    """What is in these tensors is put back afterwards."""
    before = [t.detach().clone() for t in changed]
    yield
    with torch.no_grad():
        for t, old in zip(changed, before, strict=True):
            t.copy_(old)
