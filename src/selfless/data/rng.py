"""Seeded choices that are the same on every machine and with every version of numpy.

numpy guarantees that SeedSequence and the raw bits of PCG64 never change. It does not guarantee that for `permutation` or `choice`.
So every choice here is computed from raw bits alone: a random order is the stable sorting order of n random words.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def draw_words(n: int, seed: int, what: str, index: int = 0) -> npt.NDArray[np.uint64]:
    """Draw n random 64-bit words that depend on (seed, what, index) only."""
    if seed < 0:
        raise ValueError(f"a seed is a whole number from 0 up, not {seed}")
    sequence = np.random.SeedSequence([seed, zlib.crc32(what.encode()), index])
    return np.asarray(np.random.PCG64(sequence).random_raw(n), dtype=np.uint64).reshape(n)


def draw_order(n: int, seed: int, what: str, index: int = 0) -> Ints:
    """Draw a random order of 0 … n−1."""
    return np.argsort(draw_words(n, seed, what, index), kind="stable").astype(np.int64)


def draw_uniform(n: int, seed: int, what: str, index: int = 0) -> npt.NDArray[np.float64]:
    """Draw n numbers from [0, 1), 53 bits each."""
    return (draw_words(n, seed, what, index) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def split_by_class(labels: Ints, share: float, seed: int, what: str) -> tuple[Ints, Ints]:
    """Split the rows 0 … n−1 into (kept, taken), each in ascending order.

    `share` of every class is taken, rounded: at least one row of a class that has two or more, and never all of them.
    """
    if not 0.0 <= share < 1.0:
        raise ValueError(f"{what}: the share must be in [0, 1), not {share}")
    taken = np.zeros(len(labels), dtype=bool)
    if share > 0:
        order = draw_order(len(labels), seed, what)
        for label in np.unique(labels):
            rows = order[labels[order] == label]
            count = min(len(rows) - 1, max(1, round(share * len(rows))))
            taken[rows[: max(count, 0)]] = True
    return np.flatnonzero(~taken).astype(np.int64), np.flatnonzero(taken).astype(np.int64)
