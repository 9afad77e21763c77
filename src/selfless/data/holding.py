"""What was loaded stays loaded while somebody says so: runs one after another then share one copy of their images, on a GPU too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
_HELD: list[dict[int, object]] = []


@contextmanager
def holding() -> Iterator[None]:
    """While the outermost of these lasts, what is loaded is not let go."""
    _HELD.append({})
    try:
        yield
    finally:
        _HELD.pop()


def hold(loaded: T) -> T:
    if _HELD:
        _HELD[0][id(loaded)] = loaded
    return loaded
