"""3×3 convolutions of at most 64 channels, their gradients and importances, and 2×2 pooling. Layout in memory: (F, B, H, W, C)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 64  # the most channels of a convolution here; cuDNN is faster for more
PROGRAMS = 384  # a sum over pixels is split into about so many programs, over all members, so that they fill a large GPU …
PARTIAL = 2_400_000  # … but into fewer if their partial sums would be more numbers than this


# -------------------------------------------------------------------------------------------------------------- convolutions
@triton.jit
def _conv(
    x, w, bias, h, pairs, shift, y, P, scale, s_f, s_b, s_h: tl.constexpr, s_w: tl.constexpr, s_c: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, IN: tl.constexpr,
    OUT: tl.constexpr, FLAT: tl.constexpr, FLIP: tl.constexpr, BP: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
    MASK: tl.constexpr, PAIRS: tl.constexpr, SHIFT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """y[p, o] = Σ_{tap, c} x[p + tap, c] w[tap, o, c] for a block of output pixels p (of all samples) and all output channels o.

    FLAT: few input channels (an image), so that taps and channels are summed together, as one sum of IN ≥ 9·CI products. FLIP: the taps
    are reversed. PAIRS: add scale·h pairs − shift, the gradient of a penalty on h. MASK: then set y to 0 where h is not positive.
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
    pairs: tuple[Tensor, Tensor, Tensor | None, float] | None = None,
) -> Tensor:  # fmt: skip
    """Return x ∗ weight, with the bias added and ReLU applied if asked: (F, B, O, H', W'), channels last in memory, in the type of x.

    x: (F, B, C, H, W) with any strides. weight: (F, 9, O, C). mask: (F, B, O, H', W'); the result is zero where it is not positive.
    pairs: (h, P, shift, scale); scale·hP − shift is added before the mask, which is h if there is one. h: as mask, P: (F, O, O), shift:
    (F, O) or None.
    """
    members, batch, inputs, height, width = x.shape
    outputs, flat = weight.shape[2], _is_flat(inputs)
    ho, wo = height + 2 * padding - 2, width + 2 * padding - 2
    y = torch.empty(members, batch, ho, wo, outputs, device=x.device, dtype=x.dtype)
    pixels, s = batch * ho * wo, x.stride()
    h, matrix, shift, scale = pairs or (mask, None, None, 1.0)
    _conv[(triton.cdiv(pixels, 128), members)](
        x, weight, weight if bias is None else bias, weight if h is None else _channels_last(h), weight if matrix is None else matrix,
        weight if shift is None else shift, y, pixels, scale, s[0], s[1], s[3], s[4], s[2], height, width, HO=ho, WO=wo, PAD=padding,
        CI=inputs, CO=outputs, IN=_tile(9 * inputs if flat else inputs), OUT=_tile(outputs), FLAT=flat, FLIP=flip, BP=128,
        BIAS=bias is not None, RELU=relu, MASK=mask is not None, PAIRS=matrix is not None, SHIFT=shift is not None, PREC=_precision(),
        num_warps=4, num_stages=4 if x.dtype == torch.bfloat16 else 2,
    )  # fmt: skip
    return y.permute(0, 1, 4, 2, 3)


@triton.jit
def _power(a, POWER: tl.constexpr):
    if POWER == 1:
        return tl.abs(a)
    elif POWER == 2:
        return a * a
    else:
        return a


@triton.jit
def _sums_flat(
    x, dz, out, P, LEN, COUNT, SEGMENTS, s_f, s_b, s_h: tl.constexpr, s_w: tl.constexpr, s_c: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, IN: tl.constexpr,
    OUT: tl.constexpr, BP: tl.constexpr, POWER: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The same as `_sums` for few input channels: the rows of the product are all 9·CI pairs (tap, c)."""
    n = tl.program_id(0)
    f = tl.program_id(2).to(tl.int64)
    k = tl.arange(0, IN)
    tap, c = k // CI, k % CI
    o = tl.arange(0, OUT)
    total = tl.zeros((IN, OUT), tl.float32)
    bias = tl.zeros((OUT,), tl.float32)
    for segment in range(n * SEGMENTS, tl.minimum((n + 1) * SEGMENTS, COUNT)):
        acc = tl.zeros((IN, OUT), tl.float32)
        shift = tl.zeros((BP, OUT), tl.float32)
        stop = tl.minimum((segment + 1) * LEN, P)
        for start in range(segment * LEN, stop, BP):
            p = start + tl.arange(0, BP)
            live = p < stop
            r = p % (HO * WO)
            i = r // WO - PAD
            j = r % WO - PAD
            g = tl.load(dz + (f * P + p)[:, None] * CO + o[None, :], mask=live[:, None] & (o < CO)[None, :], other=0.0)
            ii = i[None, :] + (tap // 3)[:, None]
            jj = j[None, :] + (tap % 3)[:, None]
            ok = live[None, :] & (ii >= 0) & (ii < H) & (jj >= 0) & (jj < W) & (tap < 9)[:, None]
            sample = (p // (HO * WO)).to(tl.int64) * s_b
            xs = tl.load(x + f * s_f + sample[None, :] + ii * s_h + jj * s_w + (c * s_c)[:, None], mask=ok, other=0.0)
            acc = tl.dot(xs, g, acc, input_precision=PREC)
            shift += g.to(tl.float32)
        total += _power(acc, POWER)
        bias += _power(tl.sum(shift, axis=0), POWER)
    part = (n * tl.num_programs(2) + f) * (CO * CI * 9 + CO)
    tl.store(out + part + o[None, :] * (CI * 9) + (c * 9 + tap)[:, None], total, mask=(tap < 9)[:, None] & (o < CO)[None, :])
    tl.store(out + part + CO * CI * 9 + o, bias, mask=o < CO)


@triton.jit
def _row_sums(
    x, dz, start, stop, row, a0, a1, a2, shift, s_b, s_h: tl.constexpr, s_w: tl.constexpr, s_c: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, IN: tl.constexpr,
    OUT: tl.constexpr, BP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """a_k += Σ_p x[p + (row, k), c] dz[p, o] for the three columns k, and shift (BP, OUT) += dz[p, o]; p runs from `start` to `stop`."""
    c = tl.arange(0, IN)
    o = tl.arange(0, OUT)
    for first in range(start, stop, BP):
        p = first + tl.arange(0, BP)
        live = p < stop
        r = p % (HO * WO)
        i = r // WO - PAD + row
        j = r % WO - PAD
        valid = live[:, None] if OUT == CO else live[:, None] & (o < CO)[None, :]
        g = tl.load(dz + p[:, None] * CO + o[None, :], mask=valid, other=0.0)
        inside = live & (i >= 0) & (i < H)
        at = (p // (HO * WO)) * s_b + i * s_h + j * s_w
        for column in tl.static_range(3):
            ok = inside & (j + column >= 0) & (j + column < W)
            full = ok[None, :] if IN == CI else ok[None, :] & (c < CI)[:, None]
            xs = tl.load(x + (at + column * s_w)[None, :] + (c * s_c)[:, None], mask=full, other=0.0)
            if column == 0:
                a0 = tl.dot(xs, g, a0, input_precision=PREC)
            elif column == 1:
                a1 = tl.dot(xs, g, a1, input_precision=PREC)
            else:
                a2 = tl.dot(xs, g, a2, input_precision=PREC)
        shift += g.to(tl.float32)
    return a0, a1, a2, shift


@triton.jit
def _sums(
    x, dz, out, P, LEN, COUNT, SEGMENTS, s_f, s_b, s_h: tl.constexpr, s_w: tl.constexpr, s_c: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, IN: tl.constexpr,
    OUT: tl.constexpr, BP: tl.constexpr, POWER: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Program (n, row of the kernel, f): Σ over its segments s of |Σ_{p ∈ s} x[p + tap, c] dz[p, o]|^POWER (POWER 0: the plain sum).

    A segment is LEN adjacent output pixels: for a gradient all pixels of the program, for an importance the pixels of one sample.
    """
    n = tl.program_id(0)
    row = tl.program_id(1)
    f = tl.program_id(2).to(tl.int64)
    c = tl.arange(0, IN)
    o = tl.arange(0, OUT)
    xf, zf = x + f * s_f, dz + f * P * CO
    none = tl.zeros((IN, OUT), tl.float32)
    tile = tl.zeros((BP, OUT), tl.float32)
    t0, t1, t2, bias = none, none, none, tl.zeros((OUT,), tl.float32)
    if POWER == 0:
        stop = tl.minimum((n + 1) * LEN, P)
        t0, t1, t2, shift = _row_sums(
            xf, zf, n * LEN, stop, row, t0, t1, t2, tile, s_b, s_h, s_w, s_c, H, W, HO, WO, PAD, CI, CO, IN, OUT, BP, PREC
        )
        bias = tl.sum(shift, axis=0)
    else:
        for segment in range(n * SEGMENTS, tl.minimum((n + 1) * SEGMENTS, COUNT)):
            start = segment * LEN
            a0, a1, a2, shift = _row_sums(
                xf, zf, start, start + LEN, row, none, none, none, tile, s_b, s_h, s_w, s_c, H, W, HO, WO, PAD,
                CI, CO, IN, OUT, BP, PREC,
            )  # fmt: skip
            t0 += _power(a0, POWER)
            t1 += _power(a1, POWER)
            t2 += _power(a2, POWER)
            bias += _power(tl.sum(shift, axis=0), POWER)
    part = (n * tl.num_programs(2) + f) * (CO * CI * 9 + CO)
    place = out + part + o[None, :] * (CI * 9) + (c * 9 + row * 3)[:, None]
    valid = (c < CI)[:, None] & (o < CO)[None, :]
    tl.store(place, t0, mask=valid)
    tl.store(place + 1, t1, mask=valid)
    tl.store(place + 2, t2, mask=valid)
    if row == 0:
        tl.store(out + part + CO * CI * 9 + o, bias, mask=o < CO)


def weight_sums(x: Tensor, dz: Tensor, padding: int, power: int = 0) -> tuple[Tensor, Tensor]:
    """Return (∂W (F, O, C, 3, 3), ∂b (F, O)) of a convolution from its input and dz = ∂/∂output.

    With `power` return the importances Σ_m |∂_m|^power over the samples m instead.
    """
    members, batch, inputs, height, width = x.shape
    outputs, ho, wo = dz.shape[2:]
    pixels, s, flat = batch * ho * wo, x.stride(), _is_flat(inputs)
    block = 64 if flat or x.dtype == torch.bfloat16 else 32
    parts = max(1, min(PROGRAMS // (members * (1 if flat else 3)), PARTIAL // (members * outputs * inputs * 9)))
    if power:
        length, count = ho * wo, batch
        segments = triton.cdiv(count, min(parts, count))
    else:
        length = triton.cdiv(triton.cdiv(pixels, parts), block) * block
        count, segments = triton.cdiv(pixels, length), 1
    parts = triton.cdiv(count, segments)
    weights = outputs * inputs * 9
    sums = torch.empty(parts, members, weights + outputs, device=x.device)  # the weights, then the biases
    kernel = _sums_flat if flat else _sums
    kernel[(parts, 1 if flat else 3, members)](
        x, _channels_last(dz), sums, pixels, length, count, segments, s[0], s[1], s[3], s[4], s[2], height, width, HO=ho, WO=wo,
        PAD=padding, CI=inputs, CO=outputs, IN=_tile(9 * inputs if flat else inputs), OUT=_tile(outputs), BP=block, POWER=power,
        PREC=_precision(), num_warps=8 if power and inputs * outputs > 2048 else 4, num_stages=4,
    )  # fmt: skip
    dw, db = sums.sum(0).split([weights, outputs], 1)
    return dw.contiguous().view(members, outputs, inputs, 3, 3), db


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
    source = _channels_last(x)
    total = members * batch * ((h + 1) // 2) * ((w + 1) // 2) * c
    _pool[(triton.cdiv(total, 1024),)](source, y, y, y, total, h, w, h // 2, w // 2, c, BACK=False, MASK=False, BLOCK=1024)
    return y.permute(0, 1, 4, 2, 3)


def unpool(x: Tensor, g: Tensor, mask: bool) -> Tensor:
    """Return the gradient of `pool` at x, given g = ∂/∂pool(x); with `mask`, also through the ReLU whose output x is."""
    members, batch, c, h, w = x.shape
    dx = torch.empty(members, batch, h, w, c, device=x.device, dtype=x.dtype)
    total = members * batch * ((h + 1) // 2) * ((w + 1) // 2) * c
    _pool[(triton.cdiv(total, 1024),)](
        _channels_last(x), dx, _channels_last(g), dx, total, h, w, h // 2, w // 2, c, BACK=True, MASK=mask, BLOCK=1024
    )
    return dx.permute(0, 1, 4, 2, 3)


def _channels_last(x: Tensor) -> Tensor:
    """Return (F, B, C, H, W) in the layout of the kernels: (F, B, H, W, C), contiguous."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def _is_flat(inputs: int) -> bool:
    """True for few input channels: one matrix product then covers all taps and channels."""
    return 9 * inputs <= 32


def _tile(n: int) -> int:
    """Return the smallest block size ≥ n that matrix units accept: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(n))


def _precision() -> str:
    """Return how `tl.dot` multiplies float32, after the setting of PyTorch."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
