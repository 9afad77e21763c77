"""Gradients of sparsifiers on feature maps of at most 64 channels: h is (F, M, N), where M counts samples and their positions.

A feature map is large and each product is small, so the time is that of reading h. DeCov reads it twice: once for its covariance, once
together with the gradient. No centred copy of h is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfless.engine.kernels.shapes import precision, tile

WIDEST = 64  # the most channels here: more would not fit into the shared memory of smaller GPUs
FEWEST = 1024  # the fewest rows M: for less, as in fully connected layers, the products of cuBLAS are as fast
PARTIAL = 2**20  # a sum over rows is split into programs, over all members, whose partial sums are about so many numbers …
PROGRAMS = 512  # … but into at most so many, which fill a large GPU


def is_map(h: Tensor) -> bool:
    """Return True if these kernels are the fastest for h (F, M, N)."""
    return h.shape[2] <= WIDEST and h.shape[1] >= FEWEST


@triton.jit
def _moments(h, out, M, LEN, N: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, PREC: tl.constexpr):
    """Program (part, f): Σ_m h hᵀ, then Σ_m h, over LEN rows."""
    part = tl.program_id(0)
    f = tl.program_id(1).to(tl.int64)
    n = tl.arange(0, TILE)
    pairs = tl.zeros((TILE, TILE), tl.float32)
    sums = tl.zeros((ROWS, TILE), tl.float32)
    stop = tl.minimum((part + 1) * LEN, M)
    for start in range(part * LEN, stop, ROWS):
        m = start + tl.arange(0, ROWS)
        hs = tl.load(h + (f * M + m)[:, None] * N + n[None, :], mask=(m < stop)[:, None] & (n < N)[None, :], other=0.0)
        pairs = tl.dot(tl.trans(hs), hs, pairs, input_precision=PREC)
        sums += hs.to(tl.float32)
    at = out + (part * tl.num_programs(1) + f) * (TILE * TILE + TILE)
    tl.store(at + n[:, None] * TILE + n[None, :], pairs)
    tl.store(at + TILE * TILE + n, tl.sum(sums, axis=0))


@triton.jit
def _covariance(
    parts, weight, s, matrix, shift, M, PARTS, N: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, S: tl.constexpr,
    LOW: tl.constexpr,
):  # fmt: skip
    """Program (rows, f): P = 2 weight/M (S ∘ C) with a zero diagonal, and shift = h̄P. P is symmetric. LOW: P is rounded to bf16."""
    f = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, TILE)
    pairs = tl.zeros((ROWS, TILE), tl.float32)
    sum_i = tl.zeros((ROWS,), tl.float32)
    sum_j = tl.zeros((TILE,), tl.float32)
    for part in range(0, PARTS):
        at = parts + (part * tl.num_programs(1) + f) * (TILE * TILE + TILE)
        pairs += tl.load(at + i[:, None] * TILE + j[None, :])
        sum_i += tl.load(at + TILE * TILE + i)
        sum_j += tl.load(at + TILE * TILE + j)
    mean_i, mean_j = sum_i / M, sum_j / M
    p = (pairs / M - mean_i[:, None] * mean_j[None, :]) * (2 * tl.load(weight + f) / M)
    valid = (i < N)[:, None] & (j < N)[None, :]
    place = f * N * N + i[:, None] * N + j[None, :]
    if S:
        p = p * tl.load(s + place, mask=valid, other=0.0)
    p = tl.where(i[:, None] == j[None, :], 0.0, p)
    if LOW:
        p = p.to(tl.bfloat16).to(tl.float32)
    tl.store(matrix + place, p, mask=valid)
    tl.store(shift + f * N + i, tl.sum(p * mean_j[None, :], axis=1), mask=i < N)


def covariance_matrix(h: Tensor, weight: Tensor, pairs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return P = 2 weight/M (S ∘ C), (F, N, N), with a zero diagonal, and h̄P, (F, N), for the covariances C of h (F, M, N).

    S is `pairs` (F, N, N); None: S = 1. C is E[hhᵀ] − h̄h̄ᵀ: products of bf16 are exact in float32, and float32 is not rounded to TF32.
    """
    members, rows, n = h.shape
    side, block = tile(n), 128 if h.dtype == torch.bfloat16 else 64
    programs = min(PROGRAMS, PARTIAL // side**2)
    length = triton.cdiv(triton.cdiv(rows, max(1, programs // members)), block) * block
    count = triton.cdiv(rows, length)
    parts = torch.empty(count, members, side * side + side, device=h.device)
    exact = "tf32x3" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    # Two warps: with four, products are asynchronous, and Triton 3.6 overwrites rows that they still read (docs/lab-notes/pitfalls.md).
    _moments[(count, members)](h, parts, rows, length, N=n, TILE=side, ROWS=block, PREC=exact, num_warps=2)
    matrix, shift = torch.empty(members, n, n, device=h.device), torch.empty(members, n, device=h.device)
    _covariance[(side // 16, members)](
        parts, weight, weight if pairs is None else pairs, matrix, shift, rows, count, N=n, TILE=side, ROWS=16, S=pairs is not None,
        LOW=h.dtype == torch.bfloat16,
    )  # fmt: skip
    return matrix, shift


@triton.jit
def _add_product(
    g, h, matrix, shift, out, M, scale, N: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Program (rows, f): g + scale·hP − shift, and 0 where h is 0 if MASK."""
    f = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, TILE)
    valid = (m < M)[:, None] & (n < N)[None, :]
    place = (f * M + m)[:, None] * N + n[None, :]
    hs = tl.load(h + place, mask=valid, other=0.0)
    inside = (n < N)[:, None] & (n < N)[None, :]
    p = tl.load(matrix + f * N * N + n[:, None] * N + n[None, :], mask=inside, other=0.0).to(hs.dtype)
    value = tl.dot(hs, p, input_precision=PREC) * scale + tl.load(g + place, mask=valid, other=0.0).to(tl.float32)
    if SHIFT:
        value -= tl.load(shift + f * N + n, mask=n < N, other=0.0)[None, :]
    if MASK:
        value = tl.where(hs > 0, value, 0.0)
    tl.store(out + place, value, mask=valid)


def add_product(g: Tensor, h: Tensor, matrix: Tensor, shift: Tensor | None, scale: float, mask: bool) -> Tensor:
    """Return g + scale·hP − shift, in the type of g; with `mask` 0 where h is not positive, which is the backward pass of a ReLU.

    g, h: (F, M, N), contiguous, P = matrix: (F, N, N), shift: (F, N).
    """
    members, rows, n = h.shape
    out, block = torch.empty_like(g), 128
    _add_product[(triton.cdiv(rows, block), members)](
        g, h, matrix, matrix if shift is None else shift, out, rows, scale, N=n, TILE=tile(n), ROWS=block, SHIFT=shift is not None,
        MASK=mask, PREC=precision(), num_warps=4 if n <= 64 else 8,
    )  # fmt: skip
    return out
