"""Augmentation on the device: one vectorised gather a batch, every draw from the generator that is passed in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Draws = torch.Generator | Callable[[int, int], Tensor]  # a generator, or (rows, n) → numbers from [0, 1)
TRIES = 10  # as in the usual RandomResizedCrop: so many draws before it settles for the centre


@dataclass(frozen=True)
class Augment:
    """What happens to a training image, before it is normalised (so that padding is black).

    `crop`: pad by so many pixels and crop back at random. `flip`: mirror half of the images. `resized`: a random
    crop of a share of the area in `scale` and an aspect in `ratio`, resized to `resized` pixels a side (bilinear).
    `centre`: a plain crop of that size at the centre; nothing random about it. `still()` is what test images get.
    """

    crop: int = 0
    flip: bool = False
    resized: int | None = None
    centre: int | None = None
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        if sum((self.crop > 0, self.resized is not None, self.centre is not None)) > 1:
            raise ValueError("an Augment has one of crop=, resized= and centre=, not several")

    @property
    def random(self) -> bool:
        return self.crop > 0 or self.flip or self.resized is not None

    def still(self) -> Augment | None:
        """The counterpart for evaluation: the centre crop where training images change their size, else nothing."""
        side = self.resized or self.centre
        return Augment(centre=side) if side else None

    def shape(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """The (C, H, W) that comes out for the one that goes in."""
        side = self.resized or self.centre
        return (shape[0], side, side) if side else shape

    def __call__(self, x: Tensor, generator: Draws | None = None) -> Tensor:
        """x: (n, C, H, W) → (n, C, H', W'), uint8 as it was, or float on the same scale where pixels are mixed."""
        if self.random and generator is None:
            raise ValueError("augmentation is random: pass generator=torch.Generator().manual_seed(…)")
        if self.centre is not None:
            top, left = (x.shape[2] - self.centre) // 2, (x.shape[3] - self.centre) // 2
            if min(top, left) < 0:
                raise ValueError(f"images of {x.shape[2]}×{x.shape[3]} have no centre crop of {self.centre}")
            x = x[:, :, top : top + self.centre, left : left + self.centre]
        if generator is None:
            return x
        if self.resized is not None:
            return _resized_crop(x, self, generator)
        return _shifted(x, self.crop, self.flip, generator) if self.crop or self.flip else x


def _uniform(n: int, generator: Draws, device: torch.device, rows: int = 1) -> Tensor:
    """(rows, n) from [0, 1), drawn where the generator lives: a CPU generator gives every device the same numbers."""
    if not isinstance(generator, torch.Generator):
        return generator(rows, n)
    return torch.rand((rows, n), generator=generator, device=generator.device).to(device)


def _shifted(x: Tensor, pad: int, flip: bool, generator: Draws) -> Tensor:
    """Random shift within a black border of `pad`, and mirroring, as one gather."""
    n, _, height, width = x.shape
    draws = _uniform(n, generator, x.device, rows=3)
    dy, dx = (draws[:2] * (2 * pad + 1)).long().clamp_(max=2 * pad)
    across = torch.arange(width, device=x.device).expand(n, width)
    if flip:
        across = torch.where(draws[2, :, None] < 0.5, width - 1 - across, across)
    down = torch.arange(height, device=x.device) + dy[:, None]
    across = across + dx[:, None]
    padded = F.pad(x, (pad, pad, pad, pad)) if pad else x
    places = (down[:, :, None] * padded.shape[3] + across[:, None, :]).view(n, 1, -1).expand(n, x.shape[1], -1)
    return padded.flatten(2).gather(2, places).view(x.shape)


def _boxes(draws: Tensor, height: int, width: int, how: Augment) -> Tensor:
    """(4, n): top, left, height and width of each image's crop, in pixels, from (2·TRIES + 2, n) draws: the first that fits."""
    area = height * width * (how.scale[0] + (how.scale[1] - how.scale[0]) * draws[:TRIES])
    low, high = (math.log(side) for side in how.ratio)
    aspect = (low + (high - low) * draws[TRIES : 2 * TRIES]).exp()
    w, h = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (w >= 1) & (h >= 1) & (w <= width) & (h <= height)
    places = torch.arange(TRIES, device=draws.device)[:, None]
    first = torch.where(fits, places, TRIES - 1).amin(0, keepdim=True)  # of equals, argmax takes the first on a CPU alone
    some = fits.any(0)
    side = float(min(height, width))
    w = torch.where(some, w.gather(0, first)[0], side)
    h = torch.where(some, h.gather(0, first)[0], side)
    top = torch.where(some, (draws[-2] * (height - h + 1)).floor().clamp_(max=height), (height - h) / 2)
    left = torch.where(some, (draws[-1] * (width - w + 1)).floor().clamp_(max=width), (width - w) / 2)
    return torch.stack((top, left, h, w))


def _resized_crop(x: Tensor, how: Augment, generator: Draws) -> Tensor:
    """Each image's own box, sampled bilinearly on a grid of resized × resized points."""
    n, _, height, width = x.shape
    assert how.resized is not None
    draws = _uniform(n, generator, x.device, rows=2 * TRIES + 3)  # at once: asked twice, a fleet's would be the same again
    top, left, h, w = _boxes(draws[:-1], height, width, how)
    steps = (torch.arange(how.resized, device=x.device) + 0.5) / how.resized
    down = (top[:, None] + steps * h[:, None]) * (2 / height) - 1
    across = (left[:, None] + steps * w[:, None]) * (2 / width) - 1
    if how.flip:
        mirrored = draws[-1, :, None] < 0.5
        across = torch.where(mirrored, across.flip(1), across)
    side = how.resized
    grid = torch.stack((across[:, None, :].expand(n, side, side), down[:, :, None].expand(n, side, side)), dim=-1)
    return F.grid_sample(x.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
