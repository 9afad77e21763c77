"""The next batch of every member in one kernel: rows of the images in its own order, cropped and mirrored, and normalised."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ODD_0, _ODD_1, _ODD_2 = tl.constexpr(-7046029254386353131), tl.constexpr(-4658895280553007687), tl.constexpr(-7723592293110705685)


@triton.jit
def _uniform(key, place):
    """The number of `engine.rng.uniform_at` at a place, with the constants of that module."""
    z = key + place * _ODD_0
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _ODD_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _ODD_2
    z = z ^ ((z >> 31) & 0x1FFFFFFFF)
    return ((z >> 40) & 0xFFFFFF).to(tl.float32) * (1.0 / 16777216)


@triton.jit
def _gather(
    x, y, order, offset, cursor, keys, scale, shift, x_out, y_out, n, B, D, H, W, F, PAD: tl.constexpr, FLIP: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x_out[f, b, :] = x[offset_f + order[f, cursor + b], :] · scale − shift, and y_out[f, b] is the same row of y.

    PAD: a crop at a random place of the image with a black border. FLIP: half of the images are mirrored. These are the formulas of
    `data.augment`, with the numbers that `Step` draws.
    """
    f = tl.program_id(0) // B
    b = tl.program_id(0) % B
    place = tl.load(cursor) + b
    row = tl.load(offset + f) + tl.load(order + f.to(tl.int64) * n + place)
    if tl.program_id(1) == 0:
        tl.store(y_out + tl.program_id(0), tl.load(y + row))
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < D
    source = d
    if PAD > 0 or FLIP:
        i = (d // W) % H
        j = d % W
        if FLIP:
            j = tl.where(_uniform(tl.load(keys + 2 * F + f), place) < 0.5, W - 1 - j, j)
        if PAD > 0:
            i += tl.minimum((_uniform(tl.load(keys + f), place) * (2 * PAD + 1)).to(tl.int32), 2 * PAD) - PAD
            j += tl.minimum((_uniform(tl.load(keys + F + f), place) * (2 * PAD + 1)).to(tl.int32), 2 * PAD) - PAD
            inside = inside & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        source = (d // (H * W)) * (H * W) + i * W + j
    value = tl.load(x + row * D + source, mask=inside, other=0).to(tl.float32)
    if SHIFT:
        channel = d // (H * W)
        value = value * tl.load(scale + channel, mask=d < D, other=0.0) - tl.load(shift + channel, mask=d < D, other=0.0)
    else:
        value = value * tl.load(scale)
    tl.store(x_out + tl.program_id(0).to(tl.int64) * D + d, value, mask=d < D)


def gather(
    x: Tensor, y: Tensor, order: Tensor, offset: Tensor, cursor: Tensor, size: int, scale: Tensor, shift: Tensor | None, dtype: torch.dtype,
    crop: int = 0, flip: bool = False, keys: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the next `size` samples of every member: normalised images (F, B, C, H, W) and labels (F, B).

    crop, flip   as in `data.Augment`; `keys` (3, F) are those of the random numbers: down, across, mirrored
    """
    members, shape = len(order), x.shape[1:]
    assert keys is not None or not (crop or flip)
    x_out = torch.empty(members, size, *shape, device=x.device, dtype=dtype)
    y_out = torch.empty(members, size, device=x.device, dtype=y.dtype)
    d = shape.numel()
    block = min(1024, triton.next_power_of_2(d))
    grid = (members * size, triton.cdiv(d, block))
    height, width = (shape[1], shape[2]) if len(shape) == 3 else (1, d // shape[0])
    _gather[grid](
        x, y, order, offset, cursor, order if keys is None else keys, scale, scale if shift is None else shift, x_out, y_out,
        order.shape[1], size, d, height, width, members, PAD=crop, FLIP=flip, SHIFT=shift is not None, BLOCK=block,
    )  # fmt: skip
    return x_out, y_out
