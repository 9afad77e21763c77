"""CUDA streams for work that need not wait for each other: the kernels of several members overlap where one of them does not fill the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Lanes:
    """One stream for each member. The backward pass of an operation runs on the stream of its forward pass; autograd waits for both.

    Without gradients, on a CPU or if `on` is False, all lanes are the current stream.
    """

    def __init__(self) -> None:
        self.on = True
        self._streams: list[Any] = []
        self._open = False

    @contextmanager
    def fork(self, count: int, like: Tensor) -> Iterator[None]:
        """Inside `with`: the first `count` lanes may be used. They start after the work so far; what follows `with` waits for them."""
        self._open = self.on and like.is_cuda and torch.is_grad_enabled()
        if self._open:
            self._streams += [torch.cuda.Stream(like.device) for _ in range(count - len(self._streams))]
            for stream in self._streams[:count]:
                stream.wait_stream(torch.cuda.current_stream())
        try:
            yield
        finally:
            for stream in self._streams[:count] if self._open else ():
                torch.cuda.current_stream().wait_stream(stream)
            self._open = False

    def lane(self, number: int) -> AbstractContextManager[Any]:
        """Return the context in which work is put into a lane."""
        return torch.cuda.stream(self._streams[number]) if self._open else nullcontext()
