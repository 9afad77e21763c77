"""Sums over pixels: the gradients of the weights of a 3×3 convolution, and the importances of any. Layout in memory: (F, B, H, W, C)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfless.engine.kernels.shapes import channels_last, is_flat, precision, tile

PROGRAMS = 264  # a sum over pixels is split into about so many programs, over all members, so that they fill a large GPU …
PARTIAL = 2_400_000  # … but into fewer if their partial sums would be more numbers than this
SLICE = 32  # the input channels of a program that sums over pixels; with 64 its products are asynchronous (docs/lab-notes/pitfalls.md)


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
        at = dz + first * tl.cast(s_z, tl.int64) + (t // WIDE * s_z + (i * WO + j + PAD) * CO)[:, None] + o[None, :]
        g0 = tl.load(at, mask=(live & (j + PAD < WO))[:, None] & outputs, other=0.0)
        g1 = tl.load(at - CO, mask=(live & (j + PAD >= 1) & (j + PAD < WO + 1))[:, None] & outputs, other=0.0)
        g2 = tl.load(at - 2 * CO, mask=(live & (j + PAD >= 2) & (j + PAD < WO + 2))[:, None] & outputs, other=0.0)
        r = i - PAD
        at = x + first * tl.cast(s_b, tl.int64) + (t // WIDE * s_b + r * s_h + j * s_w)[None, :] + (c * s_c)[:, None]
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
    """Program (n, slice of the input channels, f): Σ over its segments s of |Σ_{p ∈ s} x[p + tap, c] dz[p, o]|^POWER (0: the plain sum).

    For a gradient the segment is all of the program's STEPS; for an importance it is a sample, of which the program has STEPS.
    """
    n = tl.program_id(0)
    f = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * IN + tl.arange(0, IN)
    o = tl.arange(0, OUT)
    xf, zf = x + f * s_f, dz + f * B * s_z
    none = tl.zeros((IN, OUT), tl.float32)
    zeros = tl.zeros((BP, OUT), tl.float32)
    t0, t1, t2, t3, t4, t5, t6, t7, t8, bias = none, none, none, none, none, none, none, none, none, tl.zeros((OUT,), tl.float32)
    if POWER == 0:
        stop = tl.minimum((n + 1) * STEPS, tl.cdiv(B, BP // WIDE) * (HO * CHUNKS))
        t0, t1, t2, t3, t4, t5, t6, t7, t8, shift = _tap_sums(
            xf, zf, n * STEPS, stop, B, c, t0, t1, t2, t3, t4, t5, t6, t7, t8, zeros, s_b, s_z, s_h, s_w, s_c, H, W, HO, WO, PAD, CI, CO,
            OUT, WIDE, CHUNKS, BP, PREC,
        )  # fmt: skip
        bias = tl.sum(shift, axis=0)
    else:
        for b in range(n * STEPS, tl.minimum((n + 1) * STEPS, B)):
            start = b * (HO * CHUNKS)
            a0, a1, a2, a3, a4, a5, a6, a7, a8, shift = _tap_sums(
                xf, zf, start, start + HO * CHUNKS, B, c, none, none, none, none, none, none, none, none, none, zeros, s_b, s_z, s_h, s_w,
                s_c, H, W, HO, WO, PAD, CI, CO, OUT, WIDE, CHUNKS, BP, PREC,
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
    members, _, inputs, outputs = *x.shape[:3], dz.shape[2]
    sums = (_image_sums if is_flat(inputs) else _map_sums)(x, channels_last(dz), padding, power, columns)
    dw, db = sums.sum(0).split([outputs * inputs * 9, outputs], 1)
    return dw.contiguous().view(members, outputs, inputs, 3, 3), db


def _image_sums(x: Tensor, dz: Tensor, padding: int, power: int, columns: Tensor | None) -> Tensor:
    """Return the partial sums (parts, F, weights then biases) of a convolution of few input channels."""
    members, batch, inputs, outputs = *x.shape[:3], dz.shape[-1]
    assert columns is not None, "weight_sums of an image needs the columns that conv has kept"
    pixels, block = columns.shape[1], 128 if x.dtype == torch.bfloat16 else 64
    if power:
        length, count = pixels // batch, batch
        segments = triton.cdiv(count, min(max(1, 2 * PROGRAMS // members), count))
    else:
        length = triton.cdiv(triton.cdiv(pixels, max(1, 2 * PROGRAMS // members)), block) * block
        count, segments = triton.cdiv(pixels, length), 1
    parts = triton.cdiv(count, segments)
    sums = torch.empty(parts, members, outputs * inputs * 9 + outputs, device=x.device)
    _sums_flat[(parts, members)](
        columns, dz, sums, pixels, length, count, segments, CI=inputs, CO=outputs, IN=columns.shape[2], OUT=tile(outputs), BP=block,
        POWER=power, PREC=precision(), num_warps=4, num_stages=3,
    )  # fmt: skip
    return sums


def _map_sums(x: Tensor, dz: Tensor, padding: int, power: int, _: Tensor | None) -> Tensor:
    """Return the partial sums (parts, F, weights then biases) of a convolution of a feature map."""
    members, batch, inputs, height, width = x.shape
    ho, wo, outputs = dz.shape[2:]
    block, s = 64 if x.dtype == torch.bfloat16 else 32, x.stride()
    wide = min(block, max(16, triton.next_power_of_2(max(width, wo))))
    chunks, channels, block = triton.cdiv(max(width, wo), wide), min(tile(inputs), SLICE), wide if power else block
    slices, big = triton.cdiv(inputs, channels), outputs > 32
    steps = batch if power else triton.cdiv(batch, block // wide) * ho * chunks
    programs = (PROGRAMS // 2 if big else PROGRAMS) // (members * slices)
    each = triton.cdiv(steps, max(1, min(programs, PARTIAL // (members * outputs * inputs * 9))))
    sums = torch.empty(triton.cdiv(steps, each), members, outputs * inputs * 9 + outputs, device=x.device)
    _sums[(len(sums), slices, members)](
        x, dz, sums, batch, each, s[0], s[1], ho * wo * outputs, s[3], s[4], s[2], height, width, HO=ho, WO=wo, PAD=padding, CI=inputs,
        CO=outputs, IN=channels, OUT=tile(outputs), WIDE=wide, CHUNKS=chunks, BP=block, POWER=power, PREC=precision(),
        num_warps=8 if power else 4 if big else 2, num_stages=3,
    )  # fmt: skip
    return sums


# ------------------------------------------------------------------------------------------------------- importances of any size
@triton.jit
def _magnitudes(
    x, dz, out, B, EACH, P, s_f, s_b, s_h, s_w, s_c, H, W, SPAN: tl.constexpr, STRIDE_I: tl.constexpr, STRIDE_J: tl.constexpr,
    PAD_I: tl.constexpr, PAD_J: tl.constexpr, APART_I: tl.constexpr, APART_J: tl.constexpr, WO: tl.constexpr, CI: tl.constexpr,
    CO: tl.constexpr, TAPS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BP: tl.constexpr, POWER: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Program (block of weights, part, f): Σ_m |Σ_p x_m[p, c] dz_m[p, o]|^POWER of one tap, over EACH of the samples m.

    P is no constant: an assembler that knows the loop over pixels to have three or four steps drops its products (pitfalls.md).
    """
    f = tl.program_id(2).to(tl.int64)
    tap = tl.program_id(0) % TAPS
    block = tl.program_id(0) // TAPS
    c = block % tl.cdiv(CI, IN) * IN + tl.arange(0, IN)
    o = block // tl.cdiv(CI, IN) * OUT + tl.arange(0, OUT)
    total = tl.zeros((IN, OUT), tl.float32)
    for m in range(tl.program_id(1) * EACH, tl.minimum((tl.program_id(1) + 1) * EACH, B)):
        acc = tl.zeros((IN, OUT), tl.float32)
        source = x + f * s_f + m * tl.cast(s_b, tl.int64)
        delta = dz + (f * B + m) * (P * CO)
        for start in range(0, P, BP):
            p = start + tl.arange(0, BP)
            i = p // WO * STRIDE_I - PAD_I + tap // SPAN * APART_I
            j = p % WO * STRIDE_J - PAD_J + tap % SPAN * APART_J
            inside = (p < P) & (i >= 0) & (i < H) & (j >= 0) & (j < W)
            xs = tl.load(source + (i * s_h + j * s_w)[None, :] + (c * s_c)[:, None], mask=inside[None, :] & (c < CI)[:, None], other=0.0)
            g = tl.load(delta + p[:, None] * CO + o[None, :], mask=(p < P)[:, None] & (o < CO)[None, :], other=0.0)
            acc = tl.dot(xs, g, acc, input_precision=PREC)  # asynchronous, but nothing else reads the tiles (docs/lab-notes/pitfalls.md)
        total += _power(acc, POWER)
    part = (tl.program_id(1) * tl.num_programs(2) + f) * (CO * CI * TAPS)
    tl.store(out + part + (o[None, :] * CI + c[:, None]) * TAPS + tap, total, mask=(c < CI)[:, None] & (o < CO)[None, :])


def magnitudes(x: Tensor, dz: Tensor, layer: torch.nn.Conv2d, power: int) -> Tensor:
    """Return Σ_m |∂_m W|^power (F, O, C, height, width) of a convolution without groups, from its input and dz = ∂/∂output.

    No gradient of a sample is written to memory, where the 512×512×3×3 weights of one layer would take 9 MB a sample.
    """
    members, batch, inputs, height, width = x.shape
    outputs, span, s = dz.shape[2], layer.kernel_size[1], x.stride()
    taps, flat = layer.kernel_size[0] * span, channels_last(dz)
    pixels = flat.shape[2] * flat.shape[3]
    wide, high = min(64, tile(inputs)), min(64, tile(outputs))
    blocks = taps * triton.cdiv(inputs, wide) * triton.cdiv(outputs, high)
    parts = max(1, min(batch, 4 * PROGRAMS // (blocks * members)))
    each = triton.cdiv(batch, parts)
    sums = torch.empty(triton.cdiv(batch, each), members, outputs * inputs * taps, device=x.device)
    _magnitudes[(blocks, len(sums), members)](
        x, flat, sums, batch, each, pixels, s[0], s[1], s[3], s[4], s[2], height, width, SPAN=span, STRIDE_I=layer.stride[0],
        STRIDE_J=layer.stride[1], PAD_I=layer.padding[0], PAD_J=layer.padding[1], APART_I=layer.dilation[0], APART_J=layer.dilation[1],
        WO=flat.shape[3], CI=inputs, CO=outputs, TAPS=taps, IN=wide, OUT=high, BP=min(64, tile(pixels)), POWER=power,
        PREC=precision(), num_warps=4, num_stages=3,
    )  # fmt: skip
    return sums.sum(0).view(members, outputs, inputs, *layer.kernel_size)
