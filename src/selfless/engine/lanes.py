"""CUDA streams for work that need not wait for each other: kernels of several members overlap where one does not fill the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

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


class Ahead:
    """Tensors of the next epoch, computed on a stream of their own while the GPU trains.

    They are computed from the seeds and the data of the task, which are there before an epoch begins. So they wait for the work before
    the last `take`, which begins an epoch, and not for its steps.
    """

    MOST: ClassVar[int] = 2**25  # samples of a fleet whose order is drawn ahead: 256 MiB

    def __init__(self) -> None:
        self._key: tuple[int, int] | None = None
        self._found: list[Tensor] = []
        self._stream: Any = None
        self._begun: Any = None  # the event of the last `take`

    def start(self, like: Tensor, task: int, epoch: int, make: Callable[[], list[Tensor]]) -> None:
        """Begin to compute the tensors of an epoch, if they are on a GPU and not larger than `MOST`; `like` is the largest of them."""
        if not like.is_cuda or like.numel() > self.MOST:
            return
        self._stream = self._stream or torch.cuda.Stream()
        if self._begun is None:
            self._stream.wait_stream(torch.cuda.current_stream())
        else:
            self._stream.wait_event(self._begun)
        with torch.cuda.stream(self._stream):
            self._key, self._found = (task, epoch), make()

    def take(self, task: int, epoch: int) -> list[Tensor] | None:
        """Return the tensors of an epoch if they were computed ahead. What follows waits for them."""
        key, found = self._key, self._found
        self.drop()
        self._begun = None if self._stream is None else torch.cuda.current_stream().record_event()
        if key != (task, epoch):
            return None
        for tensor in found:
            tensor.record_stream(torch.cuda.current_stream())
        return found

    def drop(self) -> None:
        """Forget them. What follows waits until they are computed, because it may free what they are computed from."""
        if self._key is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._key, self._found = None, []
