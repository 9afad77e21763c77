"""The penalties on a GPU. Skipped without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfless import functional
from tests import oracles

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("n", [16, 128, 300, 4096])
@pytest.mark.parametrize("discount", ["product", "max"])
def test_formulas(n: int, discount: Any) -> None:
    h = torch.randn(8, n, generator=torch.Generator().manual_seed(0)).relu()
    alpha = 2 * (torch.arange(n) * 0.618 % 1)
    x = h.cuda().requires_grad_()
    value = functional.slnid(x, alpha.cuda(), discount=discount)
    y = h.double().requires_grad_()
    want = oracles.pairs(y, n / 6, alpha, discount)
    assert abs(value.item() - want.item()) <= 1e-5 * abs(want.item())
    (g,), (e,) = torch.autograd.grad(value, x), torch.autograd.grad(want, y)
    assert (g.cpu() - e).norm() <= 1e-5 * e.norm()
