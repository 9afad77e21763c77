"""The Triton kernels against float64, on a GPU; skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from selfless.data import Augment
from selfless.engine import rng
from selfless.engine.native.hardware import kernels
from selfless.engine.native.options import CovarianceGradient, PairGradient
from selfless.importance import closed
from tests.engine.small_runs import on_gpu

pytestmark = on_gpu
MEMBERS, BATCH = 2, 3


@pytest.fixture
def k() -> Iterator[Any]:
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    found = kernels(torch.zeros(1, device="cuda"))
    if found is None:
        pytest.skip("Triton is not installed here")
    yield found
    torch.backends.cuda.matmul.allow_tf32 = before


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    assert a.shape == b.shape
    assert float((a.double() - b.double()).norm()) <= tolerance * float(b.double().norm())


@pytest.mark.parametrize(
    ("size", "inputs", "outputs", "padding"), [(6, 3, 32, 1), (7, 32, 32, 0), (5, 32, 64, 1), (5, 16, 20, 0), (6, 1, 8, 2), (3, 16, 1, 0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions(k: Any, size: int, inputs: int, outputs: int, padding: int, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    x = drawn(MEMBERS, BATCH, inputs, size, size).relu().to(dtype)
    w, bias = (drawn(MEMBERS, outputs, inputs, 3, 3) / (9 * inputs) ** 0.5).to(dtype), drawn(MEMBERS, outputs)
    taps = w.permute(0, 3, 4, 1, 2).flatten(1, 2).contiguous()
    wide = [(x[f].double(), w[f].double()) for f in range(MEMBERS)]
    columns = k.columns_of(x, padding)
    y = k.conv(x, taps, bias, padding, relu=True, columns=columns)
    close(y, torch.stack([F.conv2d(a, b, bias[f].double(), padding=padding).relu() for f, (a, b) in enumerate(wide)]), tolerance)

    g = torch.randn_like(y)
    each = torch.stack([torch.stack([_weight_gradient(a[m], b, g[f, m], padding) for m in range(BATCH)]) for f, (a, b) in enumerate(wide)])
    shift = g.double().sum((3, 4))
    for power, reduced in ((0, lambda t: t.sum(1)), (1, lambda t: t.abs().sum(1)), (2, lambda t: t.square().sum(1))):
        weight, offset = k.weight_sums(x, g, padding, power, columns)
        close(weight, reduced(each), tolerance)
        close(offset, reduced(shift), tolerance)

    back = w.permute(0, 3, 4, 2, 1).flatten(1, 2).contiguous()
    dx = k.conv(g, back, None, 2 - padding, mask=x, flip=True)
    want = [torch.nn.grad.conv2d_input(a.shape, b, g[f].double(), padding=padding) for f, (a, b) in enumerate(wide)]
    close(dx, torch.stack(want) * (x > 0), tolerance)


@pytest.mark.parametrize(
    ("size", "inputs", "outputs", "padding"), [(32, 3, 32, 1), (32, 32, 32, 0), (15, 32, 64, 1), (15, 64, 64, 0), (70, 40, 48, 2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_many_pixels(k: Any, size: int, inputs: int, outputs: int, padding: int, dtype: torch.dtype) -> None:
    """Many steps of each program: a tile that is overwritten while a product still reads it shows only then."""
    x, w = drawn(MEMBERS, 64, inputs, size, size).relu().to(dtype), drawn(MEMBERS, 9, outputs, inputs).to(dtype)
    columns = k.columns_of(x, padding)
    g = torch.randn_like(k.conv(x, w, None, padding, columns=columns))
    w = w.unflatten(1, (3, 3)).permute(0, 3, 4, 1, 2).double()
    sums = torch.stack(
        [torch.stack([_weight_gradient(x[f, m].double(), w[f], g[f, m], padding) for m in range(64)]) for f in range(MEMBERS)]
    )
    close(k.weight_sums(x, g, padding, 0, columns)[0], sums.sum(1), 1e-4)
    close(k.weight_sums(x, g, padding, 1, columns)[0], sums.abs().sum(1), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_covariances_over_many_rows(k: Any, dtype: torch.dtype) -> None:
    h = drawn(MEMBERS, 45_000, 64).relu().to(dtype)
    wide = h.double()
    want = wide.mT @ wide / 45_000 - wide.mean(1).unsqueeze(2) * wide.mean(1).unsqueeze(1)
    matrix, _ = k.covariance_matrix(h, torch.ones(MEMBERS, device="cuda"), None)
    close(matrix, want * (1 - torch.eye(64, device="cuda")) * 2 / 45_000, 1e-3 if dtype == torch.float32 else 4e-3)


def _weight_gradient(x: Tensor, w: Tensor, g: Tensor, padding: int) -> Tensor:
    return torch.nn.grad.conv2d_weight(x[None], w.shape, g[None].double(), padding=padding)


@pytest.mark.parametrize("size", [6, 7])
@pytest.mark.parametrize("mask", [True, False])
def test_pooling(k: Any, size: int, mask: bool) -> None:
    x = drawn(MEMBERS, BATCH, 5, size, size).relu().requires_grad_()  # many ties at zero
    y = F.max_pool2d(x.flatten(0, 1), 2).view(MEMBERS, BATCH, 5, size // 2, size // 2)
    assert_close(k.pool(x.detach()), y)
    g = torch.randn_like(y)
    (want,) = torch.autograd.grad(y, x, g)
    assert_close(k.unpool(x.detach(), g, mask), want * (x > 0) if mask else want)


def test_loss_within_a_head(k: Any) -> None:
    logits, y = drawn(MEMBERS, 37, 25).requires_grad_(), torch.randint(5, 15, (MEMBERS, 37), device="cuda")
    rate, loss, hits = torch.tensor([0.1, 0.3], device="cuda"), torch.ones(MEMBERS, device="cuda"), torch.zeros(MEMBERS, device="cuda")
    given = k.cross_entropy(logits.detach(), y, rate, range(5, 15), loss, hits)
    losses = F.cross_entropy(logits[..., 5:15].flatten(0, 1), (y - 5).flatten(), reduction="none").view(y.shape)
    (want,) = torch.autograd.grad((rate * losses.mean(1)).sum(), logits)
    assert_close(given, want)
    assert_close(loss, 1 + losses.detach().sum(1))
    assert_close(hits, (logits[..., 5:15].argmax(-1) + 5 == y).sum(1).float())


def test_gathering_bias_and_update(k: Any) -> None:
    x, y = torch.randint(0, 256, (20, 3, 4, 4), device="cuda", dtype=torch.uint8), torch.arange(20, device="cuda")
    order = torch.stack([torch.randperm(10, device="cuda") for _ in range(MEMBERS)])
    offset, cursor = torch.tensor([0, 10], device="cuda"), torch.tensor([4], device="cuda")
    scale, shift = torch.rand(3, device="cuda"), torch.rand(3, device="cuda")
    images, labels = k.gather(x, y, order, offset, cursor, 5, scale, shift, torch.float32)
    rows = order[:, 4:9] + offset[:, None]
    assert_close(images, x[rows].float() * scale[:, None, None] - shift[:, None, None])
    assert_close(labels, y[rows])

    z, bias = drawn(MEMBERS, 70, 40), drawn(MEMBERS, 40)
    h, g = k.bias_(z.clone(), bias, True), drawn(MEMBERS, 70, 40)
    assert_close(h, (z + bias[:, None]).relu())
    dz, db = k.unbias(g, h)
    assert_close(dz, g * (h > 0))
    assert_close(db, (g * (h > 0)).sum(1), rtol=1e-4, atol=1e-4)

    p, u, g, omega, anchor = (torch.rand(MEMBERS, 1500, device="cuda") for _ in range(5))
    ratio, pull = torch.tensor([0.7, 1.0], device="cuda"), torch.tensor([3.0, 1e30], device="cuda")
    moved, speed = p.clone(), u.clone()
    k.update_(moved, speed, g, ratio, 0.9, omega, anchor, pull)
    want = 0.9 * ratio[:, None] * u + g
    c = pull[:, None] * omega
    assert_close(speed, want)
    assert_close(moved, torch.lerp(p - want, anchor, c / (1 + c)))
    assert torch.equal(moved[1], anchor[1])  # exactly the anchor where it is held without end
    mask, again = torch.rand_like(p) < 0.5, p.clone()
    k.update_(again, u.clone(), g, ratio, 0.9, omega, anchor, pull, (mask.to(torch.uint8), omega))
    assert torch.equal(again, torch.where(mask, omega, moved))


@pytest.mark.parametrize("augment", [Augment(crop=4, flip=True), Augment(flip=True), Augment(crop=2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathering_crops_and_flips(k: Any, augment: Augment, dtype: torch.dtype) -> None:
    x, y = torch.randint(0, 256, (40, 3, 8, 6), device="cuda", dtype=torch.uint8), torch.arange(40, device="cuda")
    order = torch.stack([torch.randperm(20, device="cuda") for _ in range(MEMBERS)])
    offset, cursor = torch.tensor([0, 20], device="cuda"), torch.tensor([4], device="cuda")
    scale, shift = torch.rand(3, device="cuda"), torch.rand(3, device="cuda")
    places = 4 + torch.arange(15, device="cuda")
    keys = torch.stack([rng.stream_key(torch.tensor([7, 8], device="cuda"), "row", row) for row in range(3)])

    def noise(rows: int, _: int) -> Tensor:
        return rng.uniform_at(keys[:rows].flatten(), places).view(rows, MEMBERS, -1).flatten(1)

    rows = (order[:, places] + offset[:, None]).flatten()
    images, labels = k.gather(x, y, order, offset, cursor, 15, scale, shift, dtype, augment.crop, augment.flip, keys)
    want = augment(x[rows], noise).float() * scale[:, None, None] - shift[:, None, None]
    assert_close(images.flatten(0, 1), want.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    assert_close(labels.flatten(), y[rows])


@pytest.mark.parametrize(("n", "rows"), [(32, 3000), (20, 1030), (64, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("owed", [True, False])
def test_penalties_on_feature_maps(k: Any, n: int, rows: int, dtype: torch.dtype, owed: bool) -> None:
    """The kernels against the formulas in float64; `owed` masks the gradient as the ReLU before does."""
    h, g = (drawn(MEMBERS, rows, n) + 0.3).relu().to(dtype), (drawn(MEMBERS, rows, n) * 1e-4).to(dtype)
    weight, s = torch.tensor([0.5, 2.0], device="cuda"), torch.rand(MEMBERS, n, n, device="cuda")
    s = s + s.mT
    assert k.is_map(h)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for given, wide in (
        (CovarianceGradient(weight), CovarianceGradient(weight.double().cpu())),
        (CovarianceGradient(weight, pairs=s), CovarianceGradient(weight.double().cpu(), pairs=s.double().cpu())),
        (PairGradient(matrix=s), PairGradient(matrix=s.double().cpu())),
    ):
        close(given.add_to(g, h, owed), wide.add_to(g.double().cpu(), h.double().cpu(), owed).cuda(), tolerance)


@pytest.mark.parametrize("n", [256, 500, 2048])
def test_covariances_of_linear_layers(k: Any, n: int) -> None:
    """The product in parts, or whole for a wide layer, against the formula in float64."""
    h, g, weight = drawn(MEMBERS, 64, n).relu(), drawn(MEMBERS, 64, n) * 1e-4, torch.tensor([0.5, 2.0], device="cuda")
    want = CovarianceGradient(weight.double().cpu()).add_to(g.double().cpu(), h.double().cpu()).cuda()
    close(CovarianceGradient(weight).add_to(g, h), want, 1e-4)


@pytest.mark.parametrize(("n", "rank"), [(160, 25), (1000, 1), (700, 40)])
def test_inhibition_by_factors(k: Any, n: int, rank: int) -> None:
    g, h, a, d = (
        drawn(MEMBERS, 37, n),
        drawn(MEMBERS, 37, n).relu(),
        drawn(MEMBERS, n, rank) / n**0.5,
        torch.rand(MEMBERS, n, device="cuda"),
    )
    want = g.double() + 0.1 * (h.double() @ a.double() @ a.double().mT - h.double() * d.double()[:, None])
    close(k.inhibit(g, h, a, d, 0.1), want)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize(
    ("layer", "size", "dtype"),
    [
        (nn.Conv2d(5, 7, 3, padding=1), (6, 5), torch.float32),
        (nn.Conv2d(70, 66, 3, padding=1), (4, 4), torch.float32),
        (nn.Conv2d(3, 9, (3, 5), (2, 1), (1, 2)), (9, 8), torch.float32),
        (nn.Conv2d(16, 20, 3, padding=2, dilation=2), (9, 9), torch.float32),
        (nn.Conv2d(64, 128, 3, padding=1), (32, 32), torch.bfloat16),
        (nn.Conv2d(64, 128, 3, padding=1), (32, 32), torch.float32),
    ],
    ids=str,
)
def test_importances_of_any_convolution(k: Any, layer: nn.Conv2d, size: tuple[int, int], dtype: torch.dtype, power: int) -> None:
    x = drawn(MEMBERS, BATCH, *size, layer.in_channels).to(dtype).permute(0, 1, 4, 2, 3)
    layer = layer.cuda().double()
    g = drawn(MEMBERS, BATCH, *layer(x[0].double()).shape[1:]).to(dtype)
    want = [dict(closed.conv(layer, x[f].double(), g[f].double(), power, 2**30))["weight"] for f in range(MEMBERS)]
    close(k.magnitudes(x, g, layer, power), torch.stack(want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [4, 8, 11, 13, 16, 17, 32])
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 64), (130, 70)])
def test_importances_over_many_samples(k: Any, inputs: int, outputs: int, size: int, dtype: torch.dtype) -> None:
    """A program sums over 1 to 16 steps of each sample; an assembler dropped the products of 3 or 4 (docs/lab-notes/pitfalls.md)."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1).cuda().double()
    x, g = drawn(8, 60, size, size, inputs).to(dtype).permute(0, 1, 4, 2, 3), drawn(8, 60, outputs, size, size).to(dtype)
    want = [dict(closed.conv(layer, x[f].double(), g[f].double(), 1, 2**30))["weight"] for f in range(8)]
    close(k.magnitudes(x, g, layer, 1), torch.stack(want))


@pytest.mark.parametrize(("rows", "n"), [(37, 20), (9000, 130)])
def test_sums_over_the_rows_of_a_bias(k: Any, rows: int, n: int) -> None:
    g, h = drawn(MEMBERS, rows, n), drawn(MEMBERS, rows, n).relu()
    dz, db = k.unbias(g, h)
    assert torch.equal(dz, g * (h > 0))
    close(db, dz.double().sum(1))
    close(k.unbias(g, None)[1], g.double().sum(1))
    k.masked_into(g, h, out := torch.empty_like(g))
    assert torch.equal(out, dz)
