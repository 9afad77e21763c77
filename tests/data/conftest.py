"""Every test of the data is isolated: no network, no data folder and an empty cache, unless it is marked `real_data`."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def isolate_every_test(isolated: None) -> None:
    """Apply `isolated` to every test of this folder."""
