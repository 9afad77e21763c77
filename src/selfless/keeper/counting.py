"""Count the bytes of the tensors that live inside a `with` block, and their peak."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Inside `with`: `now` and `peak` are the bytes of the tensors that operations have made here and that still live.

    Memory that one operation uses internally is not seen. On the meta device nothing is computed, so that a peak can be predicted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.peak = 0, 0
        self._known: set[int] = set()

    def know(self, *tensors: Tensor) -> None:
        """Do not count these tensors: they were there before."""
        for tensor in tensors:
            self._watch(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        self.know(*outer)
        found = func(*args, **(kwargs or {}))
        for tensor in tree_iter(found):
            if isinstance(tensor, Tensor):
                self._watch(tensor, 1)
        return found

    def _watch(self, tensor: Tensor, factor: int) -> None:
        """Add the bytes of a storage that is new, until it is freed."""
        for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
            storage = part.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            size = factor * storage.nbytes()
            self._known.add(key)
            weakref.finalize(storage, self._forget, key, size)
            self.now += size
            self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
