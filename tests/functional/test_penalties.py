"""Laws of the penalties, and where they run: dtypes, transforms, compilation."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from selfless import functional as f
from tests import oracles
from tests.functional.formulas import INHIBITIONS, PENALTIES, WIDE, alphas, relu


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside Dynamo itself
@pytest.mark.parametrize(("name", "n"), list(zip(PENALTIES, itertools.cycle(WIDE), strict=False)))
def test_compiles_whole(name: str, n: int) -> None:
    torch._dynamo.reset()
    h = relu(8, n).requires_grad_()
    compiled = torch.compile(PENALTIES[name], fullgraph=True, backend="aot_eager")
    (got,), (want,) = torch.autograd.grad(compiled(h), h), torch.autograd.grad(PENALTIES[name](h), h)
    assert_close(got, want, rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("sigma", [None, 2.0])
@pytest.mark.parametrize("discount", ["product", "max"])
def test_a_sparing_decov_is_the_sum_over_pairs_of_covariances(sigma: float | None, discount: Any) -> None:
    h, alpha = relu(30, 7, dtype=torch.float64), alphas(7).double()
    found = f.sparing_decov(h, f.PairForm(7, sigma, alpha, discount))
    assert_close(found, oracles.sparing_decov(h, alpha, sigma, discount))
    assert_close(f.sparing_decov(h, f.PairForm(7)), f.decov(h))  # K = D = 1
    assert_close(f.sparing_decov(h, f.PairForm(7, 1e6)), f.decov(h), rtol=1e-6, atol=0)  # σ → ∞
    needed = alpha.clone()
    needed[3] = 60.0  # an old task needs neuron 3: it is not moved
    h.requires_grad_()
    (gradient,) = torch.autograd.grad(f.sparing_decov(h, f.PairForm(7, sigma, needed, discount)), h)
    assert float(gradient[:, 3].abs().max()) < 1e-20
    assert float(gradient[:, 2].abs().max()) > 1e-6
