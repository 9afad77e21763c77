"""Facts about streams by name: nothing is loaded, and an unknown name is no error."""

from __future__ import annotations

from typing import Any

import pytest

from selfless.data.traits import stream_traits


@pytest.mark.parametrize(
    ("name", "options", "equal_sizes", "draws_after_last_epoch"),
    [
        ("permuted-mnist", {}, True, False),
        ("split-mnist", {}, False, False),
        ("joint-split-mnist", {}, False, False),
        ("split-fashion-mnist", {}, True, False),
        ("split-cifar-100", {}, True, False),
        ("blurred-mnist", {}, False, True),
        ("blurred-cifar-100", {}, True, True),
        ("objects:flowers,birds", {}, True, False),
        ("folders:my/split-mnist", {}, False, False),
        ("arrays:x.npz", {}, False, False),
        ("joint-arrays:x.npz", {"kind": "blurred"}, False, True),
        ("nonsense", {}, True, False),
    ],
)
def test_stream_traits(name: str, options: dict[str, Any], equal_sizes: bool, draws_after_last_epoch: bool) -> None:
    found = stream_traits(name, options)
    assert (found.equal_sizes, found.draws_after_last_epoch) == (equal_sizes, draws_after_last_epoch)
