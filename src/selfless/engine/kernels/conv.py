"""3×3 convolutions of at most 64 channels, their gradients and importances, and 2×2 pooling. Layout in memory: (F, B, H, W, C)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 64  # the most channels of a convolution here; cuDNN is faster for more
PROGRAMS = 264  # a sum over pixels is split into about so many programs, over all members, so that they fill a large GPU …
PARTIAL = 2_400_000  # … but into fewer if their partial sums would be more numbers than this
SLICE = 32  # the input channels of a program that sums over pixels: with 64, Triton 3.6 pipelines a wrong product (docs/lab-notes/pitfalls.md)


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
    outputs, flat = weight.shape[2], _is_flat(inputs)
    ho, wo = height + 2 * padding - 2, width + 2 * padding - 2
    y = torch.empty(members, batch, ho, wo, outputs, device=x.device, dtype=x.dtype)
    pixels, s = batch * ho * wo, x.stride()
    h, matrix, shift, scale = pairs or (mask, None, None, 1.0)
    _conv[(triton.cdiv(pixels, 128), members)](
        x, weight, weight if bias is None else bias, weight if h is None else _channels_last(h), weight if matrix is None else matrix,
        weight if shift is None else shift, y, y if columns is None else columns, pixels, scale, s[0], s[1], s[3], s[4], s[2], height, width, HO=ho, WO=wo, PAD=padding,
        CI=inputs, CO=outputs, IN=_tile(9 * inputs if flat else inputs), OUT=_tile(outputs), FLAT=flat, FLIP=flip, BP=128,
        BIAS=bias is not None, RELU=relu, MASK=mask is not None, PAIRS=matrix is not None, SHIFT=shift is not None,
        KEEP=columns is not None, PREC=_precision(), num_warps=4, num_stages=4 if x.dtype == torch.bfloat16 else 2,
    )  # fmt: skip
    return y.permute(0, 1, 4, 2, 3)


def columns_of(x: Tensor, padding: int) -> Tensor | None:
    """Return an empty tensor (F, P, K) for the K ≥ 9·C inputs of each output pixel of x (F, B, C, H, W); None if C is not small.

    An image has so few channels that reading the inputs of a pixel again for ∂W costs more than keeping them.
    """
    members, batch, inputs, height, width = x.shape
    if not _is_flat(inputs):
        return None
    pixels = batch * (height + 2 * padding - 2) * (width + 2 * padding - 2)
    return torch.empty(members, pixels, _tile(9 * inputs), device=x.device, dtype=x.dtype)


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
    columns, dz, out, P, LEN, COUNT, SEGMENTS, CI: tl.constexpr, CO: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BP: tl.constexpr,
    POWER: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Program (n, f): as `_sums`, from the columns (F, P, IN) that `conv` has kept; a segment is LEN adjacent pixels."""
    n = tl.program_id(0)
    f = tl.program_id(1).to(tl.int64)
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
            g = tl.load(dz + (f * P + p)[:, None] * CO + o[None, :], mask=live[:, None] & (o < CO)[None, :], other=0.0)
            xs = tl.load(columns + (f * P + p)[None, :] * IN + k[:, None], mask=live[None, :], other=0.0)
            acc = tl.dot(xs, g, acc, input_precision=PREC)
            shift += g.to(tl.float32)
        total += _power(acc, POWER)
        bias += _power(tl.sum(shift, axis=0), POWER)
    part = (n * tl.num_programs(1) + f) * (CO * CI * 9 + CO)
    tl.store(out + part + o[None, :] * (CI * 9) + (c * 9 + tap)[:, None], total, mask=(tap < 9)[:, None] & (o < CO)[None, :])
    tl.store(out + part + CO * CI * 9 + o, bias, mask=o < CO)


@triton.jit
def _tap_sums(
    x, dz, start, stop, B, c, a0, a1, a2, a3, a4, a5, a6, a7, a8, shift, s_b, s_z, s_h: tl.constexpr, s_w: tl.constexpr, s_c: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    OUT: tl.constexpr, WIDE: tl.constexpr, CHUNKS: tl.constexpr, BP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """a_{3r + k} += Σ x[i + r − PAD, j, c] dz[i, j − k + PAD, o] for the nine taps (r, k), and shift (BP, OUT) += dz[i, j, o].

    A step is one output row i of BP/WIDE samples, or WIDE columns j of it. Three rows of x and three shifts of dz make nine products.
    """
    t = tl.arange(0, BP)
    o = tl.arange(0, OUT)
    outputs = (o < CO)[None, :]
    for s in range(start, stop):
        first = s // (HO * CHUNKS) * (BP // WIDE)
        i = s // CHUNKS % HO
        j = t % WIDE + s % CHUNKS * WIDE
        live = first + t // WIDE < B
        at = dz + first * s_z.to(tl.int64) + (t // WIDE * s_z + (i * WO + j + PAD) * CO)[:, None] + o[None, :]
        g0 = tl.load(at, mask=(live & (j + PAD < WO))[:, None] & outputs, other=0.0)
        g1 = tl.load(at - CO, mask=(live & (j + PAD >= 1) & (j + PAD < WO + 1))[:, None] & outputs, other=0.0)
        g2 = tl.load(at - 2 * CO, mask=(live & (j + PAD >= 2) & (j + PAD < WO + 2))[:, None] & outputs, other=0.0)
        r = i - PAD
        at = x + first * s_b.to(tl.int64) + (t // WIDE * s_b + r * s_h + j * s_w)[None, :] + (c * s_c)[:, None]
        inside = (live & (j < W))[None, :] & (c < CI)[:, None]
        x0 = tl.load(at, mask=inside & (r >= 0) & (r < H), other=0.0)
        x1 = tl.load(at + s_h, mask=inside & (r >= -1) & (r < H - 1), other=0.0)
        x2 = tl.load(at + 2 * s_h, mask=inside & (r >= -2) & (r < H - 2), other=0.0)
        a0 = tl.dot(x0, g0, a0, input_precision=PREC)
        a1 = tl.dot(x0, g1, a1, input_precision=PREC)
        a2 = tl.dot(x0, g2, a2, input_precision=PREC)
        a3 = tl.dot(x1, g0, a3, input_precision=PREC)
        a4 = tl.dot(x1, g1, a4, input_precision=PREC)
        a5 = tl.dot(x1, g2, a5, input_precision=PREC)
        a6 = tl.dot(x2, g0, a6, input_precision=PREC)
        a7 = tl.dot(x2, g1, a7, input_precision=PREC)
        a8 = tl.dot(x2, g2, a8, input_precision=PREC)
        if PAD == 0:
            shift += g0.to(tl.float32)
        elif PAD == 1:
            shift += g1.to(tl.float32)
        else:
            shift += g2.to(tl.float32)
    return a0, a1, a2, a3, a4, a5, a6, a7, a8, shift


@triton.jit
def _sums(
    x, dz, out, B, STEPS, s_f, s_b, s_z, s_h: tl.constexpr, s_w: tl.constexpr, s_c: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    WIDE: tl.constexpr, CHUNKS: tl.constexpr, BP: tl.constexpr, POWER: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Program (n, slice of the input channels, f): Σ over its segments s of |Σ_{p ∈ s} x[p + tap, c] dz[p, o]|^POWER, POWER 0: the plain sum.

    For a gradient the segment is all of the program's STEPS; for an importance it is a sample, of which the program has STEPS.
    """
    n = tl.program_id(0)
    f = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * IN + tl.arange(0, IN)
    o = tl.arange(0, OUT)
    xf, zf = x + f * s_f, dz + f * B * s_z
    none = tl.zeros((IN, OUT), tl.float32)
    tile = tl.zeros((BP, OUT), tl.float32)
    t0, t1, t2, t3, t4, t5, t6, t7, t8, bias = none, none, none, none, none, none, none, none, none, tl.zeros((OUT,), tl.float32)
    if POWER == 0:
        stop = tl.minimum((n + 1) * STEPS, tl.cdiv(B, BP // WIDE) * (HO * CHUNKS))
        t0, t1, t2, t3, t4, t5, t6, t7, t8, shift = _tap_sums(
            xf, zf, n * STEPS, stop, B, c, t0, t1, t2, t3, t4, t5, t6, t7, t8, tile, s_b, s_z, s_h, s_w, s_c, H, W, HO, WO, PAD, CI, CO, OUT,
            WIDE, CHUNKS, BP, PREC,
        )  # fmt: skip
        bias = tl.sum(shift, axis=0)
    else:
        for b in range(n * STEPS, tl.minimum((n + 1) * STEPS, B)):
            start = b * (HO * CHUNKS)
            a0, a1, a2, a3, a4, a5, a6, a7, a8, shift = _tap_sums(
                xf, zf, start, start + HO * CHUNKS, B, c, none, none, none, none, none, none, none, none, none, tile, s_b, s_z, s_h, s_w, s_c,
                H, W, HO, WO, PAD, CI, CO, OUT, WIDE, CHUNKS, BP, PREC,
            )  # fmt: skip
            t0 += _power(a0, POWER)
            t1 += _power(a1, POWER)
            t2 += _power(a2, POWER)
            t3 += _power(a3, POWER)
            t4 += _power(a4, POWER)
            t5 += _power(a5, POWER)
            t6 += _power(a6, POWER)
            t7 += _power(a7, POWER)
            t8 += _power(a8, POWER)
            bias += _power(tl.sum(shift, axis=0), POWER)
    part = (n * tl.num_programs(2) + f) * (CO * CI * 9 + CO)
    place = out + part + o[None, :] * (CI * 9) + (c * 9)[:, None]
    valid = (c < CI)[:, None] & (o < CO)[None, :]
    tl.store(place, t0, mask=valid)
    tl.store(place + 1, t1, mask=valid)
    tl.store(place + 2, t2, mask=valid)
    tl.store(place + 3, t3, mask=valid)
    tl.store(place + 4, t4, mask=valid)
    tl.store(place + 5, t5, mask=valid)
    tl.store(place + 6, t6, mask=valid)
    tl.store(place + 7, t7, mask=valid)
    tl.store(place + 8, t8, mask=valid)
    if tl.program_id(1) == 0:
        tl.store(out + part + CO * CI * 9 + o, bias, mask=o < CO)


def weight_sums(x: Tensor, dz: Tensor, padding: int, power: int = 0, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (∂W (F, O, C, 3, 3), ∂b (F, O)) of a convolution from its input and dz = ∂/∂output.

    With `power` return the importances Σ_m |∂_m|^power over the samples m instead. `columns`: as kept by `conv`; needed for an image.
    """
    members, batch, inputs = x.shape[:3]
    outputs, weights = dz.shape[2], dz.shape[2] * inputs * 9
    sums = (_image_sums if _is_flat(inputs) else _map_sums)(x, _channels_last(dz), padding, power, columns)
    dw, db = sums.sum(0).split([weights, outputs], 1)
    return dw.contiguous().view(members, outputs, inputs, 3, 3), db


def _image_sums(x: Tensor, dz: Tensor, padding: int, power: int, columns: Tensor | None) -> Tensor:
    """Return the partial sums (parts, F, weights then biases) of a convolution of few input channels."""
    members, batch, inputs, outputs = *x.shape[:3], dz.shape[-1]
    assert columns is not None, "weight_sums of an image needs the columns that conv has kept"
    pixels, block = columns.shape[1], 128 if x.dtype == torch.bfloat16 else 64
    if power:
        length, count = pixels // batch, batch
        segments = triton.cdiv(count, min(2 * PROGRAMS // members, count))
    else:
        length = triton.cdiv(triton.cdiv(pixels, max(1, 2 * PROGRAMS // members)), block) * block
        count, segments = triton.cdiv(pixels, length), 1
    parts = triton.cdiv(count, segments)
    sums = torch.empty(parts, members, outputs * inputs * 9 + outputs, device=x.device)
    _sums_flat[(parts, members)](
        columns, dz, sums, pixels, length, count, segments, CI=inputs, CO=outputs, IN=columns.shape[2], OUT=_tile(outputs), BP=block,
        POWER=power, PREC=_precision(), num_warps=4, num_stages=3,
    )  # fmt: skip
    return sums


def _map_sums(x: Tensor, dz: Tensor, padding: int, power: int, _: Tensor | None) -> Tensor:
    """Return the partial sums (parts, F, weights then biases) of a convolution of a feature map."""
    members, batch, inputs, height, width = x.shape
    ho, wo, outputs = dz.shape[2:]
    block, s = 64 if x.dtype == torch.bfloat16 else 32, x.stride()
    wide = min(block, max(16, triton.next_power_of_2(max(width, wo))))
    chunks, tile, block = triton.cdiv(max(width, wo), wide), min(_tile(inputs), SLICE), wide if power else block
    slices, big = triton.cdiv(inputs, tile), outputs > 32
    steps = batch if power else triton.cdiv(batch, block // wide) * ho * chunks
    programs = (PROGRAMS // 2 if big else PROGRAMS) // (members * slices)
    each = triton.cdiv(steps, max(1, min(programs, PARTIAL // (members * outputs * inputs * 9))))
    sums = torch.empty(triton.cdiv(steps, each), members, outputs * inputs * 9 + outputs, device=x.device)
    _sums[(len(sums), slices, members)](
        x, dz, sums, batch, each, s[0], s[1], ho * wo * outputs, s[3], s[4], s[2], height, width, HO=ho, WO=wo, PAD=padding, CI=inputs, CO=outputs, IN=tile,
        OUT=_tile(outputs), WIDE=wide, CHUNKS=chunks, BP=block, POWER=power, PREC=_precision(),
        num_warps=8 if power else 4 if big else 2, num_stages=3,
    )  # fmt: skip
    return sums


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
