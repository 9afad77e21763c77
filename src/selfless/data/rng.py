"""Seeded choices that stay the same on every machine and with every numpy.

numpy promises that SeedSequence and the raw bits of PCG64 never change; it does not promise that for `permutation` or
`choice`. So everything here is made of raw bits alone: an order is the stable sorting order of n random words.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def words(n: int, seed: int, what: str, index: int = 0) -> npt.NDArray[np.uint64]:
    """n random 64-bit words that depend on (seed, what, index) only."""
    if seed < 0:
        raise ValueError(f"a seed is a whole number from 0 up, not {seed}")
    sequence = np.random.SeedSequence([seed, zlib.crc32(what.encode()), index])
    return np.asarray(np.random.PCG64(sequence).random_raw(n), dtype=np.uint64).reshape(n)


def ordering(n: int, seed: int, what: str, index: int = 0) -> Ints:
    """A random order of 0 … n−1."""
    return np.argsort(words(n, seed, what, index), kind="stable").astype(np.int64)


def uniform(n: int, seed: int, what: str, index: int = 0) -> npt.NDArray[np.float64]:
    """n numbers from [0, 1), of 53 bits each."""
    return (words(n, seed, what, index) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def stratified(labels: Ints, share: float, seed: int, what: str) -> tuple[Ints, Ints]:
    """Splits the rows 0 … n−1 into (kept, taken): `share` of every class is taken, rounded, and at least one row of a
    class that has two or more. Both parts come back in ascending order.
    """
    if not 0.0 <= share < 1.0:
        raise ValueError(f"{what}: the share must be in [0, 1), not {share}")
    taken = np.zeros(len(labels), dtype=bool)
    if share > 0:
        order = ordering(len(labels), seed, what)
        for label in np.unique(labels):
            rows = order[labels[order] == label]
            count = min(len(rows) - 1, max(1, round(share * len(rows))))
            taken[rows[: max(count, 0)]] = True
    return np.flatnonzero(~taken).astype(np.int64), np.flatnonzero(taken).astype(np.int64)
