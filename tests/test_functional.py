"""Laws first, then the dense float64 form as an oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import oracles
from selfless import SLNI, SLNID, SNI, SNID
from selfless import functional as f
from selfless.functional import gaussian
from selfless.sparsify import Sparsifier


def relu(m: int, n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).relu().to(dtype)


def alphas(n: int) -> Tensor:
    """Importances spread over [0, 2), in no order; not random, so that transforms may call it."""
    return 2 * (torch.arange(n) * 0.6180339887 % 1)


WIDE = (64, 600)  # on either side of the switch from the dense form to Fourier features
PENALTIES: dict[str, Any] = {
    "sni": f.sni,
    "slni": f.slni,
    "snid": lambda h: f.snid(h, alphas(h.shape[1])),
    "snid max": lambda h: f.snid(h, alphas(h.shape[1]), discount="max"),
    "slnid": lambda h: f.slnid(h, alphas(h.shape[1])),
    "slnid max": lambda h: f.slnid(h, alphas(h.shape[1]), discount="max"),
    "l1_rep": f.l1_rep,
    "decov": f.decov,
    "orth_reg": f.orth_reg,
}
INHIBITIONS = ("sni", "slni", "snid", "snid max", "slnid", "slnid max")


# --------------------------------------------------------------------------------------------------------------------- laws
def test_the_definition_by_loops() -> None:
    h = relu(4, 7, dtype=torch.float64)
    assert_close(f.sni(h).item(), oracles.looped(h))
    assert_close(f.slni(h, 1.7).item(), oracles.looped(h, 1.7))


@pytest.mark.parametrize("n", WIDE)
def test_infinite_sigma_is_no_locality(n: int) -> None:
    h = relu(8, n, dtype=torch.float64)
    assert_close(f.slni(h, 1e6 * n), f.sni(h), rtol=1e-6, atol=0)
    assert_close(f.slnid(h, alphas(n).double(), 1e6 * n), f.snid(h, alphas(n).double()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", INHIBITIONS)
@pytest.mark.parametrize("n", WIDE)
def test_one_active_neuron_costs_nothing(name: str, n: int) -> None:
    h = F.one_hot(torch.arange(8) * 7 % n, n).double()
    assert PENALTIES[name](h).abs() < 1e-7


@pytest.mark.parametrize("name", [*INHIBITIONS, "l1_rep", "decov"])
@pytest.mark.parametrize("n", WIDE)
def test_permuting_samples_changes_nothing(name: str, n: int) -> None:
    h = relu(16, n, dtype=torch.float64)
    assert_close(PENALTIES[name](h.flip(0)), PENALTIES[name](h))


@pytest.mark.parametrize("discount", ["product", "max"])
@pytest.mark.parametrize("n", WIDE)
def test_no_importance_means_no_discount_and_much_importance_spares(discount: Any, n: int) -> None:
    h = relu(8, n, dtype=torch.float64)
    assert_close(f.slnid(h, torch.zeros(n, dtype=torch.float64), discount=discount), f.slni(h), rtol=1e-6, atol=0)
    assert_close(f.snid(h, torch.zeros(n, dtype=torch.float64), discount=discount), f.sni(h))
    assert f.slnid(h, torch.full((n,), 100.0), discount=discount) < 1e-20


def test_sigma_defaults_to_a_sixth_of_the_width() -> None:
    for n in WIDE:
        h = relu(8, n)
        assert_close(f.slni(h), f.slni(h, n / 6))
        assert_close(f.slnid(h, alphas(n)), f.slnid(h, alphas(n), n / 6))


@pytest.mark.parametrize("name", [*INHIBITIONS, "l1_rep", "decov"])
def test_tokens_and_positions_are_samples(name: str) -> None:
    h = relu(2 * 3 * 5, 64, dtype=torch.float64)
    want = PENALTIES[name](h)
    formula = {"sni": f.sni, "slni": f.slni, "l1_rep": f.l1_rep, "decov": f.decov}.get(name)
    if formula is None:
        kind, discount = (f.snid if name.startswith("snid") else f.slnid), "max" if name.endswith("max") else "product"
        formula = lambda x: kind(x, alphas(64).double(), discount=discount)  # noqa: E731
    assert_close(formula(h.view(6, 5, 64)), want)
    assert_close(formula(h.view(2, 3, 5, 64).permute(0, 3, 1, 2)), want)
    assert_close(formula(h.view(2, 3, 5, 1, 64).permute(0, 4, 1, 2, 3)), want)


def test_signed_activations() -> None:
    h = torch.tensor([[1.0, -1.0]])
    assert f.sni(h) == -2.0  # opposite signs are rewarded, as the formula says
    assert f.sni(h, absolute=True) == 2.0
    for absolute in (f.sni, f.slni):
        x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
        assert_close(absolute(x, absolute=True), absolute(x.abs()))
    assert_close(f.slnid(x, alphas(300), absolute=True, discount="max"), f.slnid(x.abs(), alphas(300), discount="max"))
    assert_close(f.l1_rep(-x), f.l1_rep(x))


# ------------------------------------------------------------------------------------------------------------------ accuracy
@pytest.mark.parametrize("n", [2, 3, 16, 255, 256, 257, 300, 777, 1024, 4096])
@pytest.mark.parametrize("ratio", [1 / 20, 1 / 6, 1, 10])
@pytest.mark.parametrize("kind", ["slni", "slnid", "slnid max", "snid max"])
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


@settings(max_examples=60, deadline=None)
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


@pytest.mark.parametrize(("n", "sigma"), [(1000, 0.3), (1000, 1.0), (5000, 3.0)])
def test_a_narrow_kernel_is_a_band(n: int, sigma: float) -> None:
    h = relu(4, n)
    assert_close(f.slni(h, sigma).double(), oracles.pairs(h, sigma), rtol=1e-5, atol=0)
    got = f.slnid(h, alphas(n), sigma, discount="max").double()
    assert_close(got, oracles.pairs(h, sigma, alphas(n), "max"), rtol=1e-5, atol=0)


def test_second_derivatives() -> None:
    h = relu(2, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: f.slnid(x, alphas(5)), (h,))
    h = relu(2, 300, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: f.slnid(x, alphas(300), discount="max"), (h,), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: f.slnid(x, alphas(300)), (h,), fast_mode=True)


def test_decov_by_either_gram_matrix() -> None:
    for shape in ((50, 8), (8, 50)):
        h = relu(*shape, dtype=torch.float64)
        assert_close(f.decov(h), oracles.decov(h))


def test_weights() -> None:
    w = torch.randn(6, 3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_close(f.l1_param(w), w.abs().sum())
    assert_close(f.l2_param([w, 2 * w]), 5 * w.square().sum())
    rows = w.flatten(1)
    want = sum(
        math.log1p(math.exp(10 * (F.cosine_similarity(rows[i], rows[j], dim=0).item() - 1))) for i in range(6) for j in range(6) if i != j
    )
    assert_close(f.orth_reg(w).item(), want)
    assert f.orth_reg(torch.eye(4)) < f.orth_reg(torch.ones(4, 4)) / 100


# ------------------------------------------------------------------------------------------------------------- where it runs
def test_no_square_matrix_at_sixteen_thousand_neurons() -> None:
    """An N×N float32 tensor would take 1 GiB; M·N is 2 MiB."""
    n = 16384
    h, a = relu(32, n).requires_grad_(), alphas(n)

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, Tensor):
                    Largest.elements = max(Largest.elements, t.numel())
            return out

    for formula in (
        f.slni,
        lambda x: f.slnid(x, a),
        lambda x: f.slnid(x, a, discount="max"),
        lambda x: f.snid(x, a, discount="max"),
        f.decov,
    ):
        with Largest():
            formula(h).backward()
    assert Largest.elements <= 2 * n * 64  # O(M·N) and O(N·features)


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("n", WIDE)
def test_dtypes_and_autocast(name: str, n: int) -> None:
    h = relu(16, n)
    want = PENALTIES[name](h)
    assert want.dtype == torch.float32
    assert PENALTIES[name](h.double()).dtype == torch.float64
    assert_close(PENALTIES[name](h.bfloat16()), PENALTIES[name](h.bfloat16().float()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(PENALTIES[name](h), want)


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("n", WIDE)
def test_vmap_and_grad(name: str, n: int) -> None:
    h = torch.stack([relu(8, n, seed) for seed in range(3)])
    formula = PENALTIES[name]
    assert_close(torch.func.vmap(formula)(h), torch.stack([formula(x) for x in h]))
    got = torch.func.vmap(torch.func.grad(formula))(h)
    for x, g in zip(h, got, strict=True):
        leaf = x.clone().requires_grad_()
        (want,) = torch.autograd.grad(formula(leaf), leaf)
        assert_close(g, want, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside Dynamo itself
@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("n", WIDE)
def test_compiles_whole(name: str, n: int) -> None:
    torch._dynamo.reset()
    h = relu(8, n).requires_grad_()
    compiled = torch.compile(PENALTIES[name], fullgraph=True, backend="aot_eager")
    (got,), (want,) = torch.autograd.grad(compiled(h), h), torch.autograd.grad(PENALTIES[name](h), h)
    assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_kernels_are_kept_but_never_from_inside_a_transform() -> None:
    gaussian.CONSTANTS.clear()
    h = torch.stack([relu(4, 300)] * 2)
    torch.func.vmap(torch.func.grad(f.slni))(h)
    with torch.inference_mode():
        f.slni(h[0])
    assert not gaussian.CONSTANTS
    f.slni(h[0].clone().requires_grad_()).backward()
    assert len(gaussian.CONSTANTS) == 1


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"h has shape \(5,\)"):
        f.sni(torch.ones(5))
    with pytest.raises(ValueError, match="sigma is 0"):
        f.slni(torch.ones(2, 5), 0)
    with pytest.raises(ValueError, match=r"alpha has shape \(4,\), but h has 5 neurons"):
        f.slnid(torch.ones(2, 5), torch.ones(4))
    with pytest.raises(ValueError, match="'product'"):
        f.snid(torch.ones(2, 5), torch.ones(5), discount="min")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no weights"):
        f.l1_param([])


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
    factors = form.factors(h)
    local, mixed = isinstance(kind, SLNI | SLNID), discounted and getattr(kind, "discount", "") == "max"
    assert (factors is not None) == (not mixed and (n == 160 or not local))
    if factors is not None:
        a, d = factors
        made = a @ a.T - torch.diag(d)
        assert_close(made - torch.diag(made.diagonal()), s, rtol=0, atol=1e-6)
        assert made.diagonal().abs().max() < 1e-6
