"""Rotate images in integer arithmetic: every machine gets the same bytes, which floating point does not guarantee."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[Any]


def rotation_table(height: int, width: int, angle: float) -> tuple[Ints, Ints]:
    """Return the bilinear weights of a rotation by `angle` degrees, counter-clockwise.

    Each pixel of the result mixes four pixels of the image: places (4, H·W), weights (4, H·W) in 1/65536, 0 outside the image.
    """
    a = math.radians(angle)
    rows, columns = np.mgrid[0:height, 0:width]
    y, x = rows - (height - 1) / 2, columns - (width - 1) / 2
    from_x = math.cos(a) * x - math.sin(a) * y + (width - 1) / 2
    from_y = math.sin(a) * x + math.cos(a) * y + (height - 1) / 2
    fixed_x, fixed_y = (np.rint(v * 256).astype(np.int64) for v in (from_x, from_y))
    places, weights = [], []
    for down in (0, 1):
        for right in (0, 1):
            r, c = (fixed_y >> 8) + down, (fixed_x >> 8) + right
            wy, wx = (f & 255 if step else 256 - (f & 255) for f, step in ((fixed_y, down), (fixed_x, right)))
            inside = (r >= 0) & (r < height) & (c >= 0) & (c < width)
            places.append(np.where(inside, r * width + c, 0).ravel())
            weights.append(np.where(inside, wy * wx, 0).ravel())
    return np.stack(places), np.stack(weights).astype(np.int32)


def rotate(x: Tensor, places: Ints, weights: Ints) -> Tensor:
    """Rotate uint8 images x (n, C, H, W) with a `rotation_table`."""
    if x.dtype != torch.uint8:
        raise ValueError("rotated streams need uint8 images")
    flat = x.reshape(-1, places.shape[1]).numpy()
    mixed = np.full(flat.shape, 32768, dtype=np.int32)  # one half, so that the shift below rounds
    for place, weight in zip(places, weights, strict=True):
        mixed += flat.take(place, axis=1) * weight
    mixed >>= 16
    return torch.from_numpy(mixed.astype(np.uint8)).reshape(x.shape)
