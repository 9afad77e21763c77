"""Resident data: the same batches wherever the bytes lie; rotation against a slow reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from selfless.data import Augment, Joined, Part, cache_dir
from tests.data.parts import part, rng


def test_batches_are_the_rows_divided_by_255() -> None:
    one = part()
    index = torch.tensor([3, 0, 3])
    x, y = one.resident().batch(index)
    assert x.dtype == torch.float32
    torch.testing.assert_close(x, one.images[one.rows[index]].float() / 255)
    assert torch.equal(y, one.labels[one.rows[index]])
    assert len(one.resident()) == len(one) == 40
    grid, labels = one.resident().batch(torch.arange(6).view(2, 3))
    assert grid.shape == (2, 3, 3, 8, 8)
    torch.testing.assert_close(grid[1], one.resident().batch(torch.arange(3, 6))[0])
    assert labels.shape == (2, 3)


def test_mean_and_std() -> None:
    one = part(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    x, _ = one.resident().batch(torch.arange(40))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (one.mean, one.std))
    torch.testing.assert_close(x, (one.images[one.rows].float() / 255 - mean) / std)


def test_floats_are_used_as_they_are() -> None:
    one = part()
    floats = replace(one, images=torch.randn(50, 3, 8, 8, generator=rng()))
    resident = floats.resident()
    x, _ = resident.batch(torch.arange(40))
    assert torch.equal(x, floats.images[one.rows])
    x.zero_()
    assert resident.x.abs().sum() > 0, "a batch is a copy"


def test_permutation_is_applied_once() -> None:
    one = part()
    order = torch.randperm(3 * 8 * 8, generator=rng(2))
    moved = replace(one, pixels=order).resident()
    assert torch.equal(moved.x.flatten(1), one.images[one.rows].flatten(1)[:, order])
    assert torch.equal(replace(one, pixels=torch.arange(192)).resident().x, one.resident().x)


def test_a_whole_part_is_not_copied() -> None:
    one = part()
    everything = replace(one, rows=torch.arange(50))
    assert everything.resident().x.data_ptr() == one.images.data_ptr()
    assert replace(everything, angle=360.0).is_whole
    assert not replace(everything, angle=90.0).is_whole


@pytest.mark.parametrize("change", [{}, {"pixels": torch.arange(191, -1, -1)}, {"angle": 30.0}, "joined"])
def test_over_budget_the_batches_are_the_same(change: dict[str, object] | str) -> None:
    """A set larger than the budget streams from disk (or from the data set's own tensor) without changing results."""
    one: Part | Joined
    if isinstance(change, str):
        one = Joined((part(), part(pixels=torch.arange(191, -1, -1))))
    else:
        one = part(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), **change)
    near, far = one.resident(), one.resident(budget=1000)
    assert far.mapped
    assert not near.mapped
    assert one.resident(budget=10**6).mapped is False
    index, augment = torch.randint(0, 40, (64,), generator=rng(4)), Augment(crop=2, flip=True)
    for a, b in zip(near.batch(index), far.batch(index), strict=True):
        assert torch.equal(a, b)
    a, b = (r.batch(index, augment=augment, generator=rng(5))[0] for r in (near, far))
    assert torch.equal(a, b)
    scratch = cache_dir() / "scratch"
    assert not scratch.exists() or not list(scratch.iterdir()), "the scratch file is gone with its name"


def turned(x: Tensor, angle: float) -> Tensor:
    """The reference: torch's own bilinear sampling, in float64."""
    a = math.radians(angle)
    n, _, h, w = x.shape
    assert h == w
    matrix = torch.tensor([[math.cos(a), -math.sin(a), 0], [math.sin(a), math.cos(a), 0]], dtype=torch.float64)
    grid = F.affine_grid(matrix.expand(n, 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x.double(), grid, align_corners=False)


@pytest.mark.parametrize("angle", [17.0, 45.0, 133.3])
def test_rotation_is_bilinear(angle: float) -> None:
    one = part(rows=torch.arange(5))
    difference = replace(one, angle=angle).resident().x.double() - turned(one.images[:5], angle)
    assert difference.abs().max() < 2.0  # fixed point: places to 1/256 of a pixel, then rounded
    assert difference.abs().mean() < 0.5


@pytest.mark.parametrize("quarter", [1, 2, 3])
def test_quarter_turns_are_exact(quarter: int) -> None:
    one = part(rows=torch.arange(5))
    assert torch.equal(replace(one, angle=90.0 * quarter).resident().x, torch.rot90(one.images[:5], quarter, (2, 3)))


def test_orders_are_seeded() -> None:
    one = part()
    assert sorted(one.order(rng(1)).tolist()) == list(range(40))
    assert torch.equal(one.order(rng(1)), one.order(rng(1)))
    only = replace(one, weights=torch.zeros(40).index_fill_(0, torch.tensor([3, 4]), 0.5))
    assert set(only.order(rng(1)).tolist()) == {3, 4}
