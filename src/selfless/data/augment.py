"""Augment training images on the device, a whole batch at a time.

Every random number comes from the generator that the caller passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Draws = torch.Generator | Callable[[int, int], Tensor]  # a generator, or a function (rows, n) → numbers from [0, 1)
TRIES = 10  # draws of a crop before the centre is taken, as in torchvision's RandomResizedCrop


@dataclass(frozen=True)
class Augment:
    """Changes to a training image, made before it is normalised (so padding is black).

    crop      pad by this many pixels on each side, then crop to the old size at a random place
    flip      mirror half of the images
    resized   crop a random box with a share of the area in `scale` and an aspect in `ratio`, then resize it (bilinear) to this side
    centre    crop this side at the centre; not random

    Of `crop`, `resized` and `centre`, at most one is set. `still()` gives the counterpart for test images.
    """

    crop: int = 0
    flip: bool = False
    resized: int | None = None
    centre: int | None = None
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        if sum((self.crop > 0, self.resized is not None, self.centre is not None)) > 1:
            raise ValueError("an Augment takes one of crop=, resized= and centre=, not several")

    @property
    def random(self) -> bool:
        """True if the augmentation needs a generator."""
        return self.crop > 0 or self.flip or self.resized is not None

    def still(self) -> Augment | None:
        """Return the augmentation for evaluation: the centre crop if training images change their size, else None."""
        side = self.resized or self.centre
        return Augment(centre=side) if side else None

    def shape(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the (C, H, W) after augmentation of images of `shape`."""
        side = self.resized or self.centre
        return (shape[0], side, side) if side else shape

    def __call__(self, x: Tensor, generator: Draws | None = None) -> Tensor:
        """Augment x (n, C, H, W) to (n, C, H', W').

        The result keeps its dtype, except with `resized`, which mixes pixels: float on the same scale.
        """
        if self.random and generator is None:
            raise ValueError("this augmentation is random; pass generator=torch.Generator().manual_seed(…)")
        if self.centre is not None:
            top, left = (x.shape[2] - self.centre) // 2, (x.shape[3] - self.centre) // 2
            if min(top, left) < 0:
                raise ValueError(f"images of {x.shape[2]}×{x.shape[3]} are too small for a centre crop of {self.centre}")
            x = x[:, :, top : top + self.centre, left : left + self.centre]
        if generator is None:
            return x
        if self.resized is not None:
            return _crop_and_resize(x, self, generator)
        return _shift(x, self.crop, self.flip, generator) if self.crop or self.flip else x


def _draw(n: int, generator: Draws, device: torch.device, rows: int = 1) -> Tensor:
    """Draw (rows, n) numbers from [0, 1) on the generator's device, so that a CPU generator gives every device the same numbers."""
    if not isinstance(generator, torch.Generator):
        return generator(rows, n)
    return torch.rand((rows, n), generator=generator, device=generator.device).to(device)


def _shift(x: Tensor, pad: int, flip: bool, generator: Draws) -> Tensor:
    """Shift each image at random within a black border of `pad` and mirror half of them, in one gather."""
    n, _, height, width = x.shape
    draws = _draw(n, generator, x.device, rows=3)
    dy, dx = (draws[:2] * (2 * pad + 1)).long().clamp_(max=2 * pad)
    across = torch.arange(width, device=x.device).expand(n, width)
    if flip:
        across = torch.where(draws[2, :, None] < 0.5, width - 1 - across, across)
    down = torch.arange(height, device=x.device) + dy[:, None]
    across = across + dx[:, None]
    padded = F.pad(x, (pad, pad, pad, pad)) if pad else x
    places = (down[:, :, None] * padded.shape[3] + across[:, None, :]).view(n, 1, -1).expand(n, x.shape[1], -1)
    return padded.flatten(2).gather(2, places).view(x.shape)


def _boxes(draws: Tensor, height: int, width: int, augment: Augment) -> Tensor:
    """Return (4, n): top, left, height and width of each image's crop, in pixels.

    `draws` (2·TRIES + 2, n) are TRIES candidates per image; the first that fits is taken, else the centre.
    """
    area = height * width * (augment.scale[0] + (augment.scale[1] - augment.scale[0]) * draws[:TRIES])
    low, high = (math.log(side) for side in augment.ratio)
    aspect = (low + (high - low) * draws[TRIES : 2 * TRIES]).exp()
    w, h = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (w >= 1) & (h >= 1) & (w <= width) & (h <= height)
    places = torch.arange(TRIES, device=draws.device)[:, None]
    first = torch.where(fits, places, TRIES - 1).amin(0, keepdim=True)  # argmax would do, but only on a CPU does it take the first maximum
    some = fits.any(0)
    side = float(min(height, width))
    w = torch.where(some, w.gather(0, first)[0], side)
    h = torch.where(some, h.gather(0, first)[0], side)
    top = torch.where(some, (draws[-2] * (height - h + 1)).floor().clamp_(max=height), (height - h) / 2)
    left = torch.where(some, (draws[-1] * (width - w + 1)).floor().clamp_(max=width), (width - w) / 2)
    return torch.stack((top, left, h, w))


def _crop_and_resize(x: Tensor, augment: Augment, generator: Draws) -> Tensor:
    """Sample a random box of each image bilinearly at resized × resized points."""
    n, _, height, width = x.shape
    assert augment.resized is not None
    draws = _draw(
        n, generator, x.device, rows=2 * TRIES + 3
    )  # in one call: a fleet's draws depend on the row only, so a second call would repeat them
    top, left, h, w = _boxes(draws[:-1], height, width, augment)
    steps = (torch.arange(augment.resized, device=x.device) + 0.5) / augment.resized
    down = (top[:, None] + steps * h[:, None]) * (2 / height) - 1
    across = (left[:, None] + steps * w[:, None]) * (2 / width) - 1
    if augment.flip:
        mirrored = draws[-1, :, None] < 0.5
        across = torch.where(mirrored, across.flip(1), across)
    side = augment.resized
    grid = torch.stack((across[:, None, :].expand(n, side, side), down[:, :, None].expand(n, side, side)), dim=-1)
    return F.grid_sample(x.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
