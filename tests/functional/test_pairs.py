"""Inhibitions are quadratic forms."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from selfless import SLNI, SLNID, SNI, SNID
from selfless.functional import Discount, pair_values, slnid
from selfless.functional.pairs import add_dense, add_factored
from selfless.sparsify import Sparsifier
from tests.functional.formulas import alphas, relu


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_what_is_added_to_a_stack_is_the_product_with_the_matrix(dtype: torch.dtype) -> None:
    """g + Sh/M of each member, with S dense and with S = AAᵀ − diag d; S may be in another precision than h."""
    forms = [form for alpha in (torch.rand(160), torch.rand(160)) if (form := SLNID().pair_form(160, alpha.double())) is not None]
    h, g = torch.rand(2, 7, 160, dtype=dtype), torch.rand(2, 7, 160, dtype=dtype)
    matrices = torch.stack([form.matrix(h.double()) for form in forms])
    want = g.double() + h.double() @ matrices / 7
    assert_close(add_dense(g, h, matrices).double(), want, rtol=1e-4, atol=1e-4)
    factors = [found for form in forms if (found := form.factors(h)) is not None]
    a, d = (torch.stack(column) for column in zip(*factors, strict=True))
    assert_close(add_factored(g.clone(), h, a, d).double(), want, rtol=1e-4, atol=1e-4)


def test_a_changed_alpha_gives_a_new_form() -> None:
    """S is kept while α stays as it is, and computed again after α changed in place."""
    h, alpha = torch.rand(7, 6), torch.zeros(6)
    kind = SLNID()
    before = kind.penalty(h, alpha)
    alpha += 1
    assert_close(kind.penalty(h, alpha), before * torch.tensor(-2.0).exp())


@pytest.mark.parametrize("discount", ["product", "max"])
def test_a_narrow_kernel_in_a_wide_layer_is_the_sum_over_pairs(discount: Discount) -> None:
    n, sigma = 600, 1.5
    h, alpha = relu(3, n, dtype=torch.float64), alphas(n).double()
    i = torch.arange(n)
    d = torch.exp(-alpha)
    weight = d[:, None] * d[None, :] if discount == "product" else torch.minimum(d[:, None], d[None, :])
    weight = weight * torch.exp(-((i[:, None] - i[None, :]) ** 2) / (2 * sigma**2)) * (i[:, None] != i[None, :])
    assert_close(slnid(h, alpha, sigma, discount), ((h @ weight) * h).sum(1).mean())
