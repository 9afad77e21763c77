"""Crops and flips on a GPU. Skipped without one."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from selfless.data import Augment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("augment", [Augment(crop=2, flip=True), Augment(resized=14, flip=True)])
def test_crops_are_the_same_on_both_devices(augment: Augment) -> None:
    x = torch.randint(0, 256, (200, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    here, there = (augment(x.to(device), torch.Generator().manual_seed(1)) for device in ("cpu", "cuda"))
    assert_close(there.cpu(), here, rtol=0, atol=0.1)  # pixel values go up to 255
