"""Random numbers without a state: each is a hash of (seed, purpose, task, epoch, position).

The hash uses 64-bit integer arithmetic on the device where the number is needed. So there is no state to save, a member of a fleet draws
the same numbers as alone, a resumed run the same as an uninterrupted one, and a GPU the same as a CPU.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = TypeVar("Words", Tensor, NDArray[np.int64])  # arrays of 64-bit words: NumPy is several times as fast for a few of them

_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # odd 64-bit constants with a random bit pattern


def _mix(z: Words) -> Words:
    """Mix the bits of 64-bit words (SplitMix64): xor-shifts and multiplications by odd constants, modulo 2⁶⁴. It is a bijection."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _ODD[1]
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _ODD[2]
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def stream_key(seeds: Words, purpose: str, *place: int) -> Words:
    """Return one int64 key per member, (F,), from its seed, the purpose and numbers such as task and epoch."""
    key = _mix(seeds * _ODD[0] + zlib.crc32(purpose.encode()))
    for number in place:
        key = _mix(key * _ODD[0] + number + 1)
    return key


def row_keys(key: Words, rows: int) -> Words:
    """Return the keys of so many rows of random numbers, (rows, F): row k is stream_key(key, "row", k)."""
    numbers = torch.arange(1, rows + 1, device=key.device) if isinstance(key, Tensor) else np.arange(1, rows + 1)
    return _mix(stream_key(key, "row")[None, :] * _ODD[0] + numbers[:, None])


def epoch_keys(seeds: Sequence[int], rows: int, task: int, epoch: int, device: torch.device) -> Tensor:
    """Return the keys of an epoch, (4 + rows, F): of augmentation, order, dropped nodes, replayed samples; of the rows of augmentation.

    They are computed on the CPU and sent at once: on a GPU each of these small operations would be a kernel.
    """
    own = np.array(seeds, dtype=np.int64)
    found = [stream_key(own, purpose, task, epoch) for purpose in ("augment", "order", "drop", "drawn")]
    keys = torch.from_numpy(np.concatenate([np.stack(found), row_keys(found[0], rows)]))
    return keys.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else keys


def words(key: Tensor, n: int) -> Tensor:
    """Return n random int64 words for each key, (F, n)."""
    return _mix(key[:, None] + torch.arange(n, device=key.device)[None, :] * _ODD[0])


def uniform(key: Tensor, n: int) -> Tensor:
    """Return n uniform float32 numbers in [0, 1) for each key, (F, n), with 24 random bits each."""
    return uniform_at(key, torch.arange(n, device=key.device))


def uniform_at(key: Tensor, places: Tensor) -> Tensor:
    """Return the numbers of `uniform` at the positions `places` only, (F, len(places))."""
    return ((_mix(key[:, None] + places[None, :] * _ODD[0]) >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def normal(key: Tensor, n: int) -> Tensor:
    """Return n float32 numbers from N(0, 1) for each key, (F, n), by the Box–Muller formula √(−2 ln u) cos 2πv."""
    u, v = uniform(key, 2 * n).double().unflatten(1, (2, n)).unbind(1)
    return ((-2 * torch.log1p(-u)).sqrt() * torch.cos(2 * torch.pi * v)).float()


def order(key: Tensor, n: int, weights: Tensor | None = None) -> Tensor:
    """Return a permutation of n samples for each key, (F, n). With `weights` (F, n), return n draws with replacement instead."""
    if weights is None:
        return words(key, n).argsort(dim=1)
    total = weights.double().cumsum(1)
    return torch.searchsorted(total / total[:, -1:], uniform(key, n).double(), right=True).clamp_(max=n - 1)


def one_seed(seed: int, purpose: str, *place: int) -> int:
    """Return a non-negative 63-bit seed for code that needs a torch generator (dropout, a sampled Fisher)."""
    return int(stream_key(np.array([seed], dtype=np.int64), purpose, *place)[0]) & 0x7FFFFFFFFFFFFFFF
