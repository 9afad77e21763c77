"""A training step as a CUDA graph: captured once, then replayed with a single launch.

A graph stores addresses, not values. So a step may read and write only tensors that exist before it and keep their address, and Python
must not read a value. Temporary tensors belong to the graph. Code that replaces a tensor of the step must delete the graph.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from selfless.engine.draws import default_generator


class CannotCapture(RuntimeError):
    """A step that a CUDA graph cannot hold, such as one of a network that reads a value from the GPU."""


def capture(
    step: Callable[[], object],
    rewind: Callable[[], object],
    changed: Sequence[Tensor],
    drawn: Sequence[torch.Generator] = (),
    before: Sequence[Tensor] = (),
) -> torch.cuda.CUDAGraph:
    """Return the step as a graph. Before the capture two warm-up steps run, each after `rewind`.

    changed   the tensors that a step changes. Their values are restored at the end.
    drawn     the generators that a step uses besides the default one. Their states are restored at the end, as that of the default one. A
              replay reads the seed and the position of each and moves the position on, so `manual_seed` works between replays.
    before    copies of `changed` as they are now, if there are some; else they are made

    Raise CannotCapture if the warm-up works and the capture does not.
    """
    current = torch.cuda.current_stream()
    generators = [default_generator(current.device), *drawn]
    states = [generator.get_state() for generator in generators]
    with undone(changed, before):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                rewind()
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        for generator in drawn:
            graph.register_generator_state(generator)
        try:
            with no_collection(), torch.cuda.graph(graph):
                step()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # the context manager does not leave its stream if the capture fails
            for generator, state in zip(generators, states, strict=True):
                generator.graphsafe_set_state(torch.Generator(generator.device).set_state(state))  # the old one still waits for its end
            first = first_error(error)
            if isinstance(first, torch.cuda.OutOfMemoryError):
                raise first from None
            raise CannotCapture(str(first).strip().partition("\n")[0][:160]) from None
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    return graph


def first_error(error: BaseException) -> BaseException:
    """Return the error that began a chain, and free what the frames of all its errors hold.

    Those are tensors of the failed step, which belong to another stream. A capture that fails raises an error where each context ends.
    """
    chain = [error]
    while (before := chain[-1].__context__) is not None:
        chain.append(before)
    for failed in chain:
        traceback.clear_frames(failed.__traceback__)
    return chain[-1]


@contextmanager
def no_collection() -> Iterator[None]:
    """Inside `with`: no garbage collection. If an old graph were deleted during a capture, the capture would fail."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def copied(tensors: Sequence[Tensor], into: list[Tensor]) -> list[Tensor]:
    """Return copies of the tensors, written into those of before if they have the same shapes: one call instead of one for each tensor."""
    if [(t.shape, t.dtype) for t in into] != [(t.shape, t.dtype) for t in tensors]:
        into.clear()  # its memory is free for the copies
        return [t.clone() for t in tensors]
    torch._foreach_copy_(into, list(tensors))
    return into


@contextmanager
def undone(changed: Sequence[Tensor], before: Sequence[Tensor] = ()) -> Iterator[None]:
    """Restore the values of these tensors at the end of `with`; `before` are copies of them, if there are some."""
    before = before or [t.detach().clone() for t in changed]
    try:
        yield
    finally:
        with torch.no_grad():
            for t, old in zip(changed, before, strict=True):
                t.copy_(old)
