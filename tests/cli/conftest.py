"""The value of --stream for small runs."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def stream(tasks_npz: str) -> str:
    return tasks_npz
