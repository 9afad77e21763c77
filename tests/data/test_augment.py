"""Augmentation against slow references: shifts, mirrors, crops, and what is random about them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from selfless.data import Augment
from selfless.data.augment import TRIES
from tests.data.parts import part, rng


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
    """Also if the draws depend on the row only, as those of a fleet do: a second call would give the same numbers again."""

    def drawn(rows: int, n: int) -> torch.Tensor:
        return torch.stack([torch.rand(n, generator=rng(k)) for k in range(rows)])

    ramp = torch.arange(16.0).expand(4000, 1, 16, 16)
    across = (lambda o: o[:, 0, 0, -1] - o[:, 0, 0, 0])(Augment(resized=14, flip=True)(ramp, drawn))
    seen = torch.stack((across.abs(), (across < 0).float()))
    assert seen[1].mean().item() == pytest.approx(0.5, abs=0.03)
    assert abs(torch.corrcoef(seen)[0, 1].item()) < 0.06


def test_the_first_crop_that_fits_is_taken() -> None:
    """Two candidates fit, one with a quarter of the area and one with all of it. The earlier one is taken, whichever it is."""
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
    with pytest.raises(ValueError, match="too small for a centre crop of 9"):
        Augment(centre=9)(x)
