"""The fast forms against the dense float64 form as an oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from selfless import functional as f
from selfless.functional import gaussian
from tests import oracles
from tests.functional.formulas import alphas, relu

RATIOS = (1 / 20, 1 / 6, 1, 10)
SMALL, LARGE = (2, 3, 16, 255, 256, 257, 300), (777, 1024, 4096)
CASES = [(n, ratio, kind) for n in SMALL for ratio in RATIOS for kind in ("slni", "slnid", "slnid max")]
CASES += [(n, RATIOS[(i + k) % 4], kind) for i, n in enumerate(LARGE) for k, kind in enumerate(("slni", "slnid", "slnid max"))]
CASES += [(n, 1 / 6, "snid max") for n in SMALL + LARGE]  # has no σ


@pytest.mark.parametrize(("n", "ratio", "kind"), CASES)
@pytest.mark.slow
def test_within_1e5_of_the_dense_float64_form(n: int, ratio: float, kind: str) -> None:
    """Values and gradients, float32 against the N×N form in float64. Measured: 3e-7 and 7e-7."""
    h, a, sigma = relu(8, n), alphas(n), n * ratio
    if kind == "slni":
        got, want = (lambda x: f.slni(x, sigma)), (lambda x: oracles.pairs(x, sigma))
    elif kind == "snid max":
        got, want = (lambda x: f.snid(x, a, discount="max")), (lambda x: oracles.pairs(x, None, a, "max"))
    else:
        discount: Any = "max" if kind.endswith("max") else "product"
        got, want = (lambda x: f.slnid(x, a, sigma, discount=discount)), (lambda x: oracles.pairs(x, sigma, a, discount))
    x, y = h.clone().requires_grad_(), h.double().requires_grad_()
    value, exact = got(x), want(y)
    assert abs(value.item() - exact.item()) <= 1e-5 * abs(exact.item())
    (g,), (e,) = torch.autograd.grad(value, x), torch.autograd.grad(exact, y)
    assert (g - e).norm() <= 1e-5 * e.norm()
    assert (g - e).abs().max() <= 1e-5 * e.abs().max()


@settings(max_examples=25, deadline=None)
@given(st.integers(257, 5000), st.floats(0.02, 20))
def test_the_features_give_the_kernel(n: int, ratio: float) -> None:
    """|ΦΦᵀ − K| ≤ 1e-7 in every entry, with few features: their number depends on σ/N, not on N."""
    sigma = n * ratio
    features, diagonal = gaussian.fourier(n, sigma, torch.zeros((), dtype=torch.float64))
    row = features @ features[0]
    want = torch.exp(-0.5 * (torch.arange(n, dtype=torch.float64) / sigma) ** 2)
    assert (row - want).abs().max() < 1e-7
    assert abs(diagonal - 1) < 1e-7
    assert features.shape[1] <= 2 * (2 / ratio + 12)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "sigma"), [(1000, 0.3), (1000, 1.0), (5000, 3.0)])
def test_a_narrow_kernel_is_a_band(n: int, sigma: float) -> None:
    h = relu(4, n)
    assert_close(f.slni(h, sigma).double(), oracles.pairs(h, sigma), rtol=1e-5, atol=0)
    got = f.slnid(h, alphas(n), sigma, discount="max").double()
    assert_close(got, oracles.pairs(h, sigma, alphas(n), "max"), rtol=1e-5, atol=0)


def test_kernels_are_kept_but_never_from_inside_a_transform() -> None:
    gaussian.CONSTANTS.clear()
    h = torch.stack([relu(4, 300)] * 2)
    torch.func.vmap(torch.func.grad(f.slni))(h)
    with torch.inference_mode():
        f.slni(h[0])
    assert not gaussian.CONSTANTS
    f.slni(h[0].clone().requires_grad_()).backward()
    assert len(gaussian.CONSTANTS) == 1
