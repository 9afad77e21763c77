"""Facts about streams that a runner must know before it loads them, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

UNBALANCED = ("mnist",)  # sources whose classes have different numbers of images


@dataclass(frozen=True)
class StreamTraits:
    """Facts that decide whether runs on a stream can train together.

    equal_sizes             task t has the same number of samples for every seed
    draws_after_last_epoch  importance is measured on newly drawn samples, so it depends on the number of epochs
    """

    equal_sizes: bool
    draws_after_last_epoch: bool


def stream_traits(name: str, options: Mapping[str, Any] | None = None) -> StreamTraits:
    """Return the traits of the stream that `selfless.data.stream(name, **options)` makes, without loading it. Any name is allowed."""
    base = name.removeprefix("joint-")
    custom = base.startswith(("folders:", "arrays:"))
    kind, _, source = base.partition("-")
    if custom:
        kind = str((options or {}).get("kind", ""))
    unbalanced = kind in ("split", "blurred") and source in UNBALANCED
    if base.startswith("given:"):  # one object for every seed; it may be a blurred stream
        return StreamTraits(equal_sizes=True, draws_after_last_epoch=True)
    return StreamTraits(equal_sizes=not custom and not unbalanced, draws_after_last_epoch=kind == "blurred")
