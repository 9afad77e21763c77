"""What tests of the engine share: a small run, and the mark of those that need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfless import Run
from selfless.testing import small_run

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def small(data: str, **changes: Any) -> Run:
    return small_run(stream=data, **changes)
