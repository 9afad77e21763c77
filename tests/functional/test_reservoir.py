"""The law of reservoir sampling: every sample of the stream, and every pair of samples, is kept equally often."""

from __future__ import annotations

import torch

from selfless.functional import reservoir
from tests import oracles


def test_every_sample_and_every_pair_is_kept_equally_often() -> None:
    """Against the probabilities k/n and k(k−1)/n(n−1), and beside Vitter's algorithm R, within five standard deviations."""
    n, k, trials = 12, 4, 20_000
    g = torch.Generator().manual_seed(0)
    ours = torch.zeros(trials, n).scatter_(1, reservoir(torch.rand(trials, n, generator=g), k), 1.0)
    loops = torch.stack([torch.zeros(n).index_fill_(0, torch.tensor(oracles.reservoir(n, k, g)), 1.0) for _ in range(2000)])
    for kept in (ours, loops):
        assert (kept.sum(1) == k).all()
        one, two = k / n, k * (k - 1) / (n * (n - 1))
        assert ((kept.mean(0) - one).abs() < 5 * (one * (1 - one) / len(kept)) ** 0.5).all()
        pairs = (kept.T @ kept / len(kept))[~torch.eye(n, dtype=torch.bool)]
        assert ((pairs - two).abs() < 5 * (two * (1 - two) / len(kept)) ** 0.5).all()


def test_a_stream_in_parts_is_the_stream_at_once() -> None:
    keys = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    kept = torch.zeros(0, dtype=torch.int64)
    for part in torch.arange(100).split([3, 40, 1, 56]):
        joined = torch.cat([kept, part])
        kept = joined[reservoir(keys[joined], 8)]
    assert torch.equal(kept, reservoir(keys, 8))
    assert torch.equal(keys[kept], torch.arange(8))
    assert len(reservoir(keys[:5], 8)) == 5
