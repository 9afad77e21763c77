"""3×3 convolutions of at most 64 channels and 2×2 pooling; `sums` has the gradients of the weights. Layout in memory: (F, B, H, W, C)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfless.engine.kernels.shapes import channels_last, is_flat, precision, tile

CHANNELS = 64  # the most channels of a convolution here; cuDNN is faster for more


# -------------------------------------------------------------------------------------------------------------- convolutions
@triton.jit
def _conv(
    x, w, bias, h, pairs, shift, y, columns, P, scale, s_f, s_b, s_h: tl.constexpr, s_w: tl.constexpr, s_c: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, IN: tl.constexpr,
    OUT: tl.constexpr, FLAT: tl.constexpr, FLIP: tl.constexpr, BP: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
    MASK: tl.constexpr, PAIRS: tl.constexpr, SHIFT: tl.constexpr, KEEP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """y[p, o] = Σ_{tap, c} x[p + tap, c] w[tap, o, c] for a block of output pixels p (of all samples) and all output channels o.

    FLAT: few input channels (an image), so that taps and channels are summed together, as one sum of IN ≥ 9·CI products. KEEP: these
    inputs of a pixel are written to `columns` (F, P, IN). FLIP: the taps are reversed. PAIRS: add scale·h pairs − shift, the gradient of
    a penalty on h. MASK: then set y to 0 where h is not positive.
    """
    f = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    live = p < P
    b = (p // (HO * WO)).to(tl.int64)
    r = p % (HO * WO)
    i = r // WO - PAD
    j = r % WO - PAD
    o = tl.arange(0, OUT)
    k = tl.arange(0, IN)
    base = x + f * s_f + b * s_b
    if FLAT:
        c, tap = k % CI, k // CI
        ii = i[:, None] + (tap // 3)[None, :]
        jj = j[:, None] + (tap % 3)[None, :]
        ok = live[:, None] & (ii >= 0) & (ii < H) & (jj >= 0) & (jj < W) & (k < 9 * CI)[None, :]
        xs = tl.load(base[:, None] + ii * s_h + jj * s_w + c[None, :] * s_c, mask=ok, other=0.0)
        if KEEP:
            tl.store(columns + (f * P + p)[:, None] * IN + k[None, :], xs, mask=live[:, None])
        weight_tap = 8 - tap if FLIP else tap
        place = f * (9 * CI * CO) + (weight_tap * CO * CI + c)[:, None] + o[None, :] * CI
        ws = tl.load(w + place, mask=(k < 9 * CI)[:, None] & (o < CO)[None, :], other=0.0)
        acc = tl.dot(xs, ws, input_precision=PREC)
    else:
        acc = tl.zeros((BP, OUT), tl.float32)
        for tap in range(9):
            ii = i + tap // 3
            jj = j + tap % 3
            ok = live & (ii >= 0) & (ii < H) & (jj >= 0) & (jj < W)
            full = ok[:, None] if IN == CI else ok[:, None] & (k < CI)[None, :]
            xs = tl.load((base + ii * s_h + jj * s_w)[:, None] + k[None, :] * s_c, mask=full, other=0.0)
            weight_tap = 8 - tap if FLIP else tap
            place = f * (9 * CI * CO) + weight_tap * (CI * CO) + k[:, None] + o[None, :] * CI
            if IN == CI and OUT == CO:  # noqa: SIM108 (decided when the kernel is compiled)
                ws = tl.load(w + place)
            else:
                ws = tl.load(w + place, mask=(k < CI)[:, None] & (o < CO)[None, :], other=0.0)
            acc = tl.dot(xs, ws, acc, input_precision=PREC)
    valid = live[:, None] & (o < CO)[None, :]
    place = (f * P + p)[:, None] * CO + o[None, :]
    if BIAS:
        acc += tl.load(bias + f * CO + o, mask=o < CO, other=0.0)[None, :]
    if RELU:
        acc = tl.maximum(acc, 0.0)
    if MASK or PAIRS:
        hs = tl.load(h + place, mask=valid, other=0.0)
        if PAIRS:
            q = tl.arange(0, OUT)
            ps = tl.load(pairs + f * (CO * CO) + q[:, None] * CO + o[None, :], mask=(q < CO)[:, None] & (o < CO)[None, :], other=0.0)
            acc += scale * tl.dot(hs, ps.to(hs.dtype), input_precision=PREC)
            if SHIFT:
                acc -= tl.load(shift + f * CO + o, mask=o < CO, other=0.0)[None, :]
        if MASK:
            acc = tl.where(hs > 0, acc, 0.0)
    tl.store(y + place, acc, mask=valid)


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, *, relu: bool = False, mask: Tensor | None = None, flip: bool = False,
    pairs: tuple[Tensor, Tensor, Tensor | None, float] | None = None, columns: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return x ∗ weight, with the bias added and ReLU applied if asked: (F, B, O, H', W'), channels last in memory, in the type of x.

    x: (F, B, C, H, W) with any strides. weight: (F, 9, O, C). mask: (F, B, O, H', W'); the result is zero where it is not positive.
    pairs: (h, P, shift, scale); scale·hP − shift is added before the mask, which is h if there is one. h: as mask, P: (F, O, O), shift:
    (F, O) or None.
    columns: a tensor from `columns_of`, into which the inputs of every output pixel are written.
    """
    members, batch, inputs, height, width = x.shape
    outputs, flat = weight.shape[2], is_flat(inputs)
    ho, wo = height + 2 * padding - 2, width + 2 * padding - 2
    y = torch.empty(members, batch, ho, wo, outputs, device=x.device, dtype=x.dtype)
    pixels, s = batch * ho * wo, x.stride()
    h, matrix, shift, scale = pairs or (mask, None, None, 1.0)
    _conv[(triton.cdiv(pixels, 128), members)](
        x, weight, weight if bias is None else bias, weight if h is None else channels_last(h), weight if matrix is None else matrix,
        weight if shift is None else shift, y, y if columns is None else columns, pixels, scale, s[0], s[1], s[3], s[4], s[2], height,
        width, HO=ho, WO=wo, PAD=padding, CI=inputs, CO=outputs, IN=tile(9 * inputs if flat else inputs), OUT=tile(outputs), FLAT=flat,
        FLIP=flip, BP=128, BIAS=bias is not None, RELU=relu, MASK=mask is not None, PAIRS=matrix is not None, SHIFT=shift is not None,
        KEEP=columns is not None, PREC=precision(), num_warps=4, num_stages=4 if x.dtype == torch.bfloat16 else 2,
    )  # fmt: skip
    return y.permute(0, 1, 4, 2, 3)


def columns_of(x: Tensor, padding: int) -> Tensor | None:
    """Return an empty tensor (F, P, K) for the K ≥ 9·C inputs of each output pixel of x (F, B, C, H, W); None if C is not small.

    An image has so few channels that reading the inputs of a pixel again for ∂W costs more than keeping them.
    """
    members, batch, inputs, height, width = x.shape
    if not is_flat(inputs):
        return None
    pixels = batch * (height + 2 * padding - 2) * (width + 2 * padding - 2)
    return torch.empty(members, pixels, tile(9 * inputs), device=x.device, dtype=x.dtype)


# ------------------------------------------------------------------------------------------------------------------- pooling
@triton.jit
def _pool(x, y, g, dx, total, H, W, HO, WO, C, BACK: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr):
    """y = max over 2×2 windows, one element per window. BACK: the gradient dx instead; in a tie only the first element gets it.

    MASK: the gradient is zero where the maximum is not positive.
    """
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    hc, wc = (H + 1) // 2, (W + 1) // 2
    c = e % C
    j = (e // C) % wc
    i = (e // C // wc) % hc
    b = e // C // wc // hc
    whole = (e < total) & (i < HO) & (j < WO)
    at = ((b * H + 2 * i) * W + 2 * j) * C + c
    low = -float("inf")
    x0 = tl.load(x + at, mask=whole, other=low).to(tl.float32)
    x1 = tl.load(x + at + C, mask=whole, other=low).to(tl.float32)
    x2 = tl.load(x + at + W * C, mask=whole, other=low).to(tl.float32)
    x3 = tl.load(x + at + W * C + C, mask=whole, other=low).to(tl.float32)
    m = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
    out = ((b * HO + i) * WO + j) * C + c
    if BACK:
        d = tl.load(g + out, mask=whole, other=0.0).to(tl.float32)
        if MASK:
            d = tl.where(m > 0, d, 0.0)
        down, right = 2 * i + 1 < H, 2 * j + 1 < W
        tl.store(dx + at, tl.where(whole & (x0 == m), d, 0.0), mask=e < total)
        tl.store(dx + at + C, tl.where(whole & (x1 == m) & (x0 != m), d, 0.0), mask=(e < total) & right)
        tl.store(dx + at + W * C, tl.where(whole & (x2 == m) & (x0 != m) & (x1 != m), d, 0.0), mask=(e < total) & down)
        last = whole & (x0 != m) & (x1 != m) & (x2 != m)
        tl.store(dx + at + W * C + C, tl.where(last, d, 0.0), mask=(e < total) & down & right)
    else:
        tl.store(y + out, m, mask=whole)


def pool(x: Tensor) -> Tensor:
    """Return the maxima of 2×2 windows of x (F, B, C, H, W). Argument and result are channels last in memory."""
    members, batch, c, h, w = x.shape
    y = torch.empty(members, batch, h // 2, w // 2, c, device=x.device, dtype=x.dtype)
    source = channels_last(x)
    total = members * batch * ((h + 1) // 2) * ((w + 1) // 2) * c
    _pool[(triton.cdiv(total, 1024),)](source, y, y, y, total, h, w, h // 2, w // 2, c, BACK=False, MASK=False, BLOCK=1024)
    return y.permute(0, 1, 4, 2, 3)


def unpool(x: Tensor, g: Tensor, mask: bool) -> Tensor:
    """Return the gradient of `pool` at x, given g = ∂/∂pool(x); with `mask`, also through the ReLU whose output x is."""
    members, batch, c, h, w = x.shape
    dx = torch.empty(members, batch, h, w, c, device=x.device, dtype=x.dtype)
    total = members * batch * ((h + 1) // 2) * ((w + 1) // 2) * c
    _pool[(triton.cdiv(total, 1024),)](
        channels_last(x), dx, channels_last(g), dx, total, h, w, h // 2, w // 2, c, BACK=True, MASK=mask, BLOCK=1024
    )
    return dx.permute(0, 1, 4, 2, 3)
