"""Random numbers as a function of where they are used: the same on every device, alone or in a fleet, before or after a resume.

A word is a hash of (seed, purpose, task, epoch, place), computed where it is needed with 64-bit integer arithmetic. There is no state to
save, a member of a fleet draws what it would draw alone, and a GPU draws what a CPU does.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # 64-bit odd constants with well-spread bits


def _mix(z: Tensor) -> Tensor:
    """A bijection of 64-bit words that leaves no visible pattern: xor-shifts and odd multipliers, wrapping."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _ODD[1]
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _ODD[2]
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def stream_key(seeds: Tensor, purpose: str, *place: int) -> Tensor:
    """(F,) int64: one key a member for (its seed, purpose, place…)."""
    key = _mix(seeds * _ODD[0] + zlib.crc32(purpose.encode()))
    for number in place:
        key = _mix(key * _ODD[0] + number + 1)
    return key


def words(key: Tensor, n: int) -> Tensor:
    """(F, n) int64 random words of each key."""
    return _mix(key[:, None] + torch.arange(n, device=key.device)[None, :] * _ODD[0])


def uniform(key: Tensor, n: int) -> Tensor:
    """(F, n) float32 in [0, 1), of 24 bits each."""
    return uniform_at(key, torch.arange(n, device=key.device))


def uniform_at(key: Tensor, places: Tensor) -> Tensor:
    """(F, len(places)): the numbers of `uniform` at some places only."""
    return ((_mix(key[:, None] + places[None, :] * _ODD[0]) >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def normal(key: Tensor, n: int) -> Tensor:
    """(F, n) float32 from N(0, 1), by Box and Muller's √(−2 ln u) cos 2πv."""
    u, v = uniform(key, 2 * n).double().unflatten(1, (2, n)).unbind(1)
    return ((-2 * torch.log1p(-u)).sqrt() * torch.cos(2 * torch.pi * v)).float()


def order(key: Tensor, n: int, weights: Tensor | None = None) -> Tensor:
    """(F, n) int64: one epoch's order of n samples a member; with `weights` (F, n), n draws with replacement instead."""
    if weights is None:
        return words(key, n).argsort(dim=1)
    total = weights.double().cumsum(1)
    return torch.searchsorted(total / total[:, -1:], uniform(key, n).double(), right=True).clamp_(max=n - 1)


def one_seed(seed: int, purpose: str, *place: int) -> int:
    """A non-negative 63-bit seed for a generator that must be a generator (dropout, a sampled Fisher)."""
    return int(stream_key(torch.tensor([seed]), purpose, *place)[0]) & 0x7FFFFFFFFFFFFFFF
