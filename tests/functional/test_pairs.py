"""Inhibitions are quadratic forms."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from selfless import SLNI, SLNID, SNI, SNID
from selfless.sparsify import Sparsifier


@pytest.mark.parametrize("n", [6, 160])
@pytest.mark.parametrize("kind", [SNI(), SNID(), SLNI(), SLNID(), SLNI(sigma=50.0), SNID(discount="max"), SLNID(discount="max")], ids=str)
@pytest.mark.parametrize("discounted", [False, True])
def test_inhibitions_are_quadratic_forms(n: int, kind: Sparsifier, discounted: bool) -> None:
    """R = 1/M Σ hᵀSh with S of `matrix`, and S = AAᵀ − diag d of `factors` where there are such."""
    h = torch.rand(7, n, dtype=torch.float64)
    alpha = torch.rand(n, dtype=torch.float64) if discounted else None
    form = kind.pair_form(n, alpha)
    assert form is not None
    s = form.matrix(h)
    assert_close(((h @ s) * h).sum(1).mean(), kind.penalty(h, alpha), rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(kind.penalty(x := h.clone().requires_grad_(), alpha), x)
    assert_close(form.gradient(h), gradient, rtol=1e-6, atol=1e-6)
    factors = form.factors(h)
    local, mixed = isinstance(kind, SLNI | SLNID), discounted and getattr(kind, "discount", "") == "max"
    assert (factors is not None) == (not mixed and (n == 160 or not local))
    if factors is not None:
        a, d = factors
        made = a @ a.T - torch.diag(d)
        assert_close(made - torch.diag(made.diagonal()), s, rtol=0, atol=1e-6)
        assert made.diagonal().abs().max() < 1e-6
