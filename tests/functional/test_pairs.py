"""Inhibitions are quadratic forms."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from selfless import SLNI, SLNID, SNI, SNID
from selfless.functional import pair_values
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


@pytest.mark.parametrize("n", [6, 160])
@pytest.mark.parametrize("kind", [SNI(), SNID(), SLNI(), SLNID(), SNID(discount="max"), SLNID(discount="max")], ids=str)
def test_values_of_several_layers_have_the_derivatives_of_each(n: int, kind: Sparsifier) -> None:
    """R of two layers at once, its gradient and its second derivative along a vector, beside those of each formula."""
    torch.manual_seed(0)
    hs = [torch.rand(m, n, dtype=torch.float64, requires_grad=True) for m in (7, 5)]
    alphas = [torch.rand(n, dtype=torch.float64) for _ in hs]
    along = [torch.rand_like(h) for h in hs]
    found = []
    for at_once in (True, False):
        forms = [form for alpha in alphas if (form := kind.pair_form(n, alpha)) is not None]
        values = pair_values(forms, hs) if at_once else torch.stack([kind.penalty(h, alpha) for h, alpha in zip(hs, alphas, strict=True)])
        once = torch.autograd.grad(values @ values.new_tensor([1.0, 3.0]), hs, create_graph=True)
        twice = torch.autograd.grad(once, hs, along)
        found.append([values, *once, *twice])
    for a, b in zip(*found, strict=True):
        assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_changed_alpha_gives_a_new_form() -> None:
    """S is kept while α stays as it is, and computed again after α changed in place."""
    h, alpha = torch.rand(7, 6), torch.zeros(6)
    kind = SLNID()
    before = kind.penalty(h, alpha)
    alpha += 1
    assert_close(kind.penalty(h, alpha), before * torch.tensor(-2.0).exp())
