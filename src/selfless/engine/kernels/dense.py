"""Kernels for the loss, linear layers, the gradient of a sparsifier, and the update of the parameters."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MANY = 4096  # rows of a batch from which on a sum over them is split


# ---------------------------------------------------------------------------------------------------------------------- loss
@triton.jit
def _cross_entropy(logits, y, rate, loss_sum, hits, grad, B, C, first, size, COLS: tl.constexpr, ROWS: tl.constexpr):
    """One program per member: add to its loss and its hits; grad = rate_f/B · (softmax − 1_y) in the columns of the head."""
    f = tl.program_id(0).to(tl.int64)
    scale = tl.load(rate + f) / B
    c = tl.arange(0, COLS)
    total = tl.zeros((ROWS,), tl.float32)
    right = tl.zeros((ROWS,), tl.float32)
    for start in range(0, B, ROWS):
        b = start + tl.arange(0, ROWS)
        live = (b < B)[:, None] & (c < size)[None, :]
        place = (f * B + b)[:, None] * C + first + c[None, :]
        z = tl.load(logits + place, mask=live, other=-float("inf")).to(tl.float32)
        label = tl.load(y + f * B + b, mask=b < B, other=0) - first
        top = tl.max(z, axis=1)
        e = tl.exp(z - top[:, None])
        e = tl.where(live, e, 0.0)
        norm = tl.sum(e, axis=1)
        is_label = c[None, :] == label[:, None]
        label_logit = tl.sum(tl.where(is_label & live, z, 0.0), axis=1)
        total += tl.where(b < B, tl.log(norm) + top - label_logit, 0.0)
        right += tl.where((b < B) & (tl.argmax(z, axis=1) == label), 1.0, 0.0)
        tl.store(grad + place, scale * (e / norm[:, None] - tl.where(is_label, 1.0, 0.0)), mask=live)
    tl.store(loss_sum + f, tl.load(loss_sum + f) + tl.sum(total, axis=0))
    tl.store(hits + f, tl.load(hits + f) + tl.sum(right, axis=0))


def cross_entropy(logits: Tensor, y: Tensor, rate: Tensor, head: range, loss_sum: Tensor, hits: Tensor) -> Tensor:
    """Return ∂(Σ_f rate_f · mean_b CE)/∂logits, (F, B, C). Adds each member's loss and correct answers to `loss_sum` and `hits`."""
    members, batch, columns = logits.shape
    cols = max(2, triton.next_power_of_2(len(head)))
    grad = torch.empty_like(logits) if len(head) == columns else torch.zeros_like(logits)
    rows = max(1, min(triton.next_power_of_2(batch), 4096 // cols))
    _cross_entropy[(members,)](
        logits, y, rate, loss_sum, hits, grad, batch, columns, head.start, len(head), COLS=cols, ROWS=rows, num_warps=8
    )
    return grad


# ------------------------------------------------------------------------------------------------------------- linear layers
@triton.jit
def _bias(z, bias, out, N, M, RELU: tl.constexpr, BLOCK: tl.constexpr):
    """out = z + b, or relu(z + b). Program: (block of rows × columns, f)."""
    f = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(z + f * M + e, mask=e < M, other=0.0).to(tl.float32) + tl.load(bias + f * N + e % N, mask=e < M, other=0.0)
    if RELU:
        value = tl.maximum(value, 0.0)
    tl.store(out + f * M + e, value, mask=e < M)


def bias_(z: Tensor, bias: Tensor, relu: bool, out: Tensor | None = None) -> Tensor:
    """z + bias, or relu(z + bias), in place or into `out`; z: (F, …, N), bias: (F, N)."""
    per_member, to = z[0].numel(), z if out is None else out
    _bias[(triton.cdiv(per_member, 1024), len(z))](z, bias, to, z.shape[-1], per_member, RELU=relu, BLOCK=1024)
    return to


@triton.jit
def _unbias(g, h, dz, db, B, N, LEN, RELU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """dz = g · [h > 0] if RELU; db = Σ_b dz over LEN of the B rows. Program: (block of columns, part of the rows, f)."""
    f = tl.program_id(2).to(tl.int64)
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.float32)
    first = tl.program_id(1) * LEN
    for start in range(first, tl.minimum(first + LEN, B), ROWS):
        b = start + tl.arange(0, ROWS)
        live = (b < B)[:, None] & (c < N)[None, :]
        place = (f * B + b)[:, None] * N + c[None, :]
        value = tl.load(g + place, mask=live, other=0.0).to(tl.float32)
        if RELU:
            value = tl.where(tl.load(h + place, mask=live, other=0.0) > 0, value, 0.0)
            tl.store(dz + place, value, mask=live)
        total += tl.sum(value, axis=0)
    tl.store(db + (tl.program_id(1) * tl.num_programs(2) + f) * N + c, total, mask=c < N)


def unbias(g: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (∂/∂z, ∂/∂bias) of h = relu(z + b), or of z + b if h is None, given g = ∂/∂h: (F, B, N)."""
    members, batch, n = g.shape
    dz = g if h is None else torch.empty_like(g)
    cols, length = (32, batch) if batch <= MANY else (min(128, triton.next_power_of_2(n)), MANY // 4)  # a feature map has many rows
    parts = triton.cdiv(batch, length)
    db = torch.empty(parts, members, n, device=g.device)
    _unbias[(triton.cdiv(n, cols), parts, members)](
        g, g if h is None else h, dz, db, batch, n, length, RELU=h is not None, ROWS=64, COLS=cols
    )  # fmt: skip
    return dz, db[0] if parts == 1 else db.sum(0)


@triton.jit
def _masked(g, h, out, M, BLOCK: tl.constexpr):
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(g + e, mask=e < M, other=0.0)
    tl.store(out + e, tl.where(tl.load(h + e, mask=e < M, other=0.0) > 0, value, 0.0), mask=e < M)


def masked_into(g: Tensor, h: Tensor, out: Tensor) -> None:
    """out = g · [h > 0]; all contiguous."""
    _masked[(triton.cdiv(g.numel(), 1024),)](g, h, out, g.numel(), BLOCK=1024)


# ---------------------------------------------------------------------------------------------------------------- sparsifiers
@triton.jit
def _project(h, a, out, B, N, LEN, R: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PREC: tl.constexpr):
    """Program (rows, part, f): one part of hA, the sum over LEN of the N neurons."""
    f = tl.program_id(2).to(tl.int64)
    b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, RANK)
    acc = tl.zeros((ROWS, RANK), tl.float32)
    start = tl.program_id(1) * LEN
    for first in range(start, tl.minimum(start + LEN, N), COLS):
        n = first + tl.arange(0, COLS)
        hs = tl.load(h + (f * B + b)[:, None] * N + n[None, :], mask=(b < B)[:, None] & (n < N)[None, :], other=0.0)
        valid = (n < N)[:, None] if R == RANK else (n < N)[:, None] & (k < R)[None, :]
        ws = tl.load(a + f * N * R + n[:, None] * R + k[None, :], mask=valid, other=0.0)
        acc = tl.dot(hs, ws, acc, input_precision=PREC)
    place = ((tl.program_id(1) * tl.num_programs(2) + f) * B + b)[:, None] * RANK + k[None, :]
    tl.store(out + place, acc, mask=(b < B)[:, None])


@triton.jit
def _inhibit(
    g, h, a, d, parts, out, B, N, F, share, R: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Program (rows, columns, f): g + share·((hA)Aᵀ − d h)."""
    f = tl.program_id(2).to(tl.int64)
    b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLS + tl.arange(0, COLS)
    k = tl.arange(0, RANK)
    code = tl.zeros((ROWS, RANK), tl.float32)
    for part in tl.static_range(PARTS):
        code += tl.load(parts + ((part * F + f) * B + b)[:, None] * RANK + k[None, :], mask=(b < B)[:, None], other=0.0)
    valid = (n < N)[None, :] if R == RANK else (n < N)[None, :] & (k < R)[:, None]
    ws = tl.load(a + f * N * R + n[None, :] * R + k[:, None], mask=valid, other=0.0)
    live = (b < B)[:, None] & (n < N)[None, :]
    place = (f * B + b)[:, None] * N + n[None, :]
    pull = tl.dot(code, ws, input_precision=PREC) - tl.load(d + f * N + n, mask=n < N, other=0.0)[None, :] * tl.load(h + place, mask=live)
    tl.store(out + place, tl.load(g + place, mask=live) + share * pull, mask=live)


def inhibit(g: Tensor, h: Tensor, factors: Tensor, diagonal: Tensor, share: float) -> Tensor:
    """Return g + share·h(AAᵀ − diag d): the gradient g with the one of a sparsifier added.

    g, h: (F, M, N), A = factors: (F, N, r), d = diagonal: (F, N). Two passes: hA in parts, then the sum.
    """
    members, batch, n = h.shape
    r = factors.shape[2]
    rank, rows, parts = max(16, triton.next_power_of_2(r)), 16, 8
    code = torch.empty(parts, members, batch, rank, device=h.device)
    out = torch.empty_like(g)
    length = triton.cdiv(triton.cdiv(n, parts), 128) * 128
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    _project[(triton.cdiv(batch, rows), parts, members)](
        h, factors, code, batch, n, length, R=r, RANK=rank, ROWS=rows, COLS=128, PREC=precision
    )
    _inhibit[(triton.cdiv(batch, rows), triton.cdiv(n, 128), members)](
        g, h, factors, diagonal, code, out, batch, n, members, share, R=r, RANK=rank, PARTS=parts, ROWS=rows, COLS=128, PREC=precision
    )
    return out


# -------------------------------------------------------------------------------------------------------------------- update
@triton.jit
def _update(
    p, u, g, omega, anchor, mask, fixed, ratio, pull, momentum, N, ANCHOR: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The formulas of `update_` for one block of parameters of member f."""
    f = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # a layer of 65,536 neurons has more than 2³¹ weights
    live = e < N
    at = f * N + e
    speed = tl.load(u + at, mask=live) * (momentum * tl.load(ratio + f)) + tl.load(g + at, mask=live).to(tl.float32)
    tl.store(u + at, speed, mask=live)
    value = tl.load(p + at, mask=live) - speed
    if ANCHOR:
        c = tl.minimum(tl.load(pull + f) * tl.load(omega + at, mask=live), 1e30)
        target = tl.load(anchor + at, mask=live)
        gap = target - value
        # Two forms of the same value: the second gives exactly θ* for large c.
        value = tl.where(c < 1, value + gap * (c / (1 + c)), target - gap / (1 + c))
    if HELD:
        value = tl.where(tl.load(mask + at, mask=live, other=0) != 0, tl.load(fixed + at, mask=live), value)
    tl.store(p + at, value, mask=live)


def update_(
    p: Tensor, u: Tensor, g: Tensor, ratio: Tensor, momentum: float, omega: Tensor | None, anchor: Tensor | None, pull: Tensor,
    held: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """u ← μ r_f u + g;  θ ← θ − u;  θ ← θ + cΩ/(1 + cΩ)·(θ* − θ), c = pull_f;  all (F, …), in place.

    g is the gradient times the learning rate, r_f the ratio of this step's rate to that of the last step. Without Ω, no anchor.
    held   (mask, value): where the mask (uint8) is not 0, θ is set to the value
    """
    n = p[0].numel()
    mask, value = held or (p, p)
    _update[(triton.cdiv(n, 1024), len(p))](
        p, u, g, p if omega is None else omega, p if anchor is None else anchor, mask, value, ratio, pull, momentum, n,
        ANCHOR=omega is not None and anchor is not None, HELD=held is not None, BLOCK=1024,
    )  # fmt: skip


@triton.jit
def _rates(factors, step, base, inhibition, strength, lr, ratio, lr_lambda, pull, F, total, momentum, BLOCK: tl.constexpr):
    """The formulas of `rates_`, one program for all members."""
    f = tl.arange(0, BLOCK)
    live = f < F
    now = tl.load(step)
    rate = tl.load(factors + f * total + now, mask=live, other=0.0)
    last = tl.load(factors + f * total + tl.maximum(now - 1, 0), mask=live, other=1.0)
    value = tl.load(base + f, mask=live, other=0.0) * rate
    tl.store(lr + f, value, mask=live)
    tl.store(ratio + f, tl.where(last > 0, rate / tl.where(last > 0, last, 1.0), 0.0), mask=live)
    tl.store(lr_lambda + f, value * tl.load(inhibition + f, mask=live, other=0.0), mask=live)
    tl.store(pull + f, 2 * value * tl.load(strength + f, mask=live, other=0.0) / (1 - momentum), mask=live)


def rates_(
    factors: Tensor, step: Tensor, base: Tensor, inhibition: Tensor, strength: Tensor, momentum: float, to: tuple[Tensor, ...]
) -> None:
    """Write this step's (lr, ratio, lr·λ, pull), (F,) each, into `to`.

    lr = base · factors[:, step];  ratio = factor of this step / factor of the last;  lr·λ = lr · inhibition, λ of the sparsifier;
    pull = 2 lr · strength / (1 − momentum), strength λ of the preserver. factors: (F, steps).
    """
    members, total = factors.shape
    _rates[(1,)](
        factors, step, base, inhibition, strength, *to, members, total, momentum, BLOCK=triton.next_power_of_2(members)
    )  # fmt: skip
