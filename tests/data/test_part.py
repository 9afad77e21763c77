"""Resident data: the same batches wherever the bytes lie; rotation and augmentation against slow references."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from selfless.data import Augment, Joined, Part, cache_dir
from selfless.data.augment import TRIES


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def part(n: int = 50, shape: tuple[int, int, int] = (3, 8, 8), **change: object) -> Part:
    images = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=rng())
    made = Part(images, torch.arange(n) % 7, torch.randperm(n, generator=rng(1))[: n - 10])
    return replace(made, **change)  # type: ignore[arg-type]


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
    assert replace(everything, angle=360.0).whole
    assert not replace(everything, angle=90.0).whole


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


def test_crop_and_flip_are_shifts_and_mirrors_of_the_image() -> None:
    x = part().images[:20]
    out = Augment(crop=2, flip=True)(x, rng(3))
    assert out.dtype == torch.uint8
    kinds = set()
    padded = F.pad(x, (2, 2, 2, 2))
    for i in range(20):
        shifts = {(dy, dx): padded[i, :, dy : dy + 8, dx : dx + 8] for dy in range(5) for dx in range(5)}
        places = [(*at, flip) for at, v in shifts.items() for flip in (0, 1) if torch.equal(out[i], v.flip(2) if flip else v)]
        assert len(places) == 1, "every image is one shift, mirrored or not"
        kinds.add(places[0])
    assert len(kinds) > 10
    assert {flip for _, _, flip in kinds} == {0, 1}


def test_augmentation_is_seeded_and_needs_a_generator() -> None:
    x = part().images
    for augment in (Augment(crop=2), Augment(flip=True), Augment(resized=6, flip=True)):
        assert torch.equal(augment(x, rng(3)), augment(x, rng(3)))
        assert not torch.equal(augment(x, rng(3)), augment(x, rng(4)))
        with pytest.raises(ValueError, match="pass generator="):
            augment(x)
    with pytest.raises(ValueError, match="one of crop="):
        Augment(crop=1, resized=3)


def test_flips_are_even() -> None:
    x = torch.arange(2, dtype=torch.uint8).view(1, 1, 1, 2).expand(4000, 1, 1, 2)
    assert Augment(flip=True)(x, rng())[:, 0, 0, 0].float().mean().item() == pytest.approx(0.5, abs=0.03)


def test_resized_crop() -> None:
    x = part(shape=(3, 16, 16)).images
    augment = Augment(resized=14)
    assert augment.shape((3, 16, 16)) == (3, 14, 14)
    out = augment(x, rng())
    assert out.shape == (50, 3, 14, 14)
    assert out.min() >= 0
    assert out.max() <= 255
    whole = Augment(resized=16, scale=(1.0, 1.0), ratio=(1.0, 1.0))(x, rng())
    torch.testing.assert_close(whole, x.float(), atol=1e-2, rtol=0)
    flat = torch.full((4, 1, 16, 16), 7, dtype=torch.uint8)
    torch.testing.assert_close(augment(flat, rng()), torch.full((4, 1, 14, 14), 7.0))
    ramp = torch.arange(16.0).expand(200, 1, 16, 16)
    widths = (lambda o: o[:, 0, 0, -1] - o[:, 0, 0, 0])(augment(ramp, rng())) * 14 / 13 / 16
    assert 0.2 < widths.min() < 0.45
    assert widths.max() > 0.9


def test_mirroring_does_not_follow_from_the_crop() -> None:
    """Also where numbers are a function of their row, as a fleet's are: asked for again they are the same again."""

    def drawn(rows: int, n: int) -> torch.Tensor:
        return torch.stack([torch.rand(n, generator=rng(k)) for k in range(rows)])

    ramp = torch.arange(16.0).expand(4000, 1, 16, 16)
    across = (lambda o: o[:, 0, 0, -1] - o[:, 0, 0, 0])(Augment(resized=14, flip=True)(ramp, drawn))
    seen = torch.stack((across.abs(), (across < 0).float()))
    assert seen[1].mean().item() == pytest.approx(0.5, abs=0.03)
    assert abs(torch.corrcoef(seen)[0, 1].item()) < 0.06


def test_the_first_crop_that_fits_is_taken() -> None:
    """Two draws that fit, one of a quarter of the area and one of all of it: the earlier one, whichever it is."""
    ramp = torch.arange(16.0).expand(2, 1, 16, 16)
    draws = torch.full((2 * TRIES + 3, 2), 0.5)
    draws[:TRIES] = 0.0
    draws[1, 0] = draws[0, 1] = 1.0
    widths = (lambda o: o[:, 0, 0, -1] - o[:, 0, 0, 0])(Augment(resized=16, scale=(0.25, 1.0), ratio=(1.0, 1.0))(ramp, lambda *_: draws))
    torch.testing.assert_close(widths, torch.tensor([7.5, 15.0]), atol=0.01, rtol=0)


def test_evaluation_gets_the_centre() -> None:
    x = part().images
    still = Augment(resized=6, flip=True).still()
    assert still == Augment(centre=6)
    assert torch.equal(still(x), x[:, :, 1:7, 1:7])
    assert Augment(crop=4, flip=True).still() is None
    assert part().resident().batch(torch.arange(3), augment=still)[0].shape == (3, 3, 6, 6)
    with pytest.raises(ValueError, match="no centre crop"):
        Augment(centre=9)(x)
