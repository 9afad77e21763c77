"""A training step as a CUDA graph: captured once, replayed from then on, for the price of one launch.

A graph holds addresses, not values. So a step may only read and write tensors that were there before it and stay there, and read nothing
back into Python; what it makes for itself lives in the graph. Whoever replaces such a tensor must drop the graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def capture(step: Callable[[], object], rewind: Callable[[], object], changed: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
    """Return the step as a graph. Capturing takes two steps to warm up, each after a `rewind`, and undoes them, random state included."""
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
    """Collect no garbage: an old graph that dies while a new one is captured spoils it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def undone(changed: Sequence[Tensor]) -> Iterator[None]:
    """Put back the values of these tensors afterwards."""
    before = [t.detach().clone() for t in changed]
    yield
    with torch.no_grad():
        for t, old in zip(changed, before, strict=True):
            t.copy_(old)
