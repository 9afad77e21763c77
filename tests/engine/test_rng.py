"""Draws are fixed and even."""

from __future__ import annotations

import numpy as np
import torch

from selfless.engine import rng


def test_draws_are_fixed_and_even() -> None:
    key = rng.stream_key(torch.arange(4), "order", 1, 2)
    order = rng.order(key, 1000)
    assert order[0, :5].tolist() == PINNED
    assert (order.sort(1).values == torch.arange(1000)).all()
    assert (rng.order(key[2:3], 1000)[0] == order[2]).all()
    u = rng.uniform(rng.stream_key(torch.arange(64), "noise"), 4096)
    assert abs(u.mean().item() - 0.5) < 2e-3
    assert abs(u.var().item() - 1 / 12) < 1e-3
    assert np.abs(np.corrcoef(u[:16].numpy()) - np.eye(16)).max() < 0.08
    weights = torch.tensor([[0.0, 1.0, 3.0]]).repeat(4, 1).repeat_interleave(100, 1)
    drawn = rng.order(key, 300, weights)
    assert (drawn >= 100).all()
    assert 0.6 < (drawn >= 200).float().mean() < 0.9


def test_the_keys_of_an_epoch_are_those_of_their_purposes() -> None:
    """They are computed at once, and must be what each function draws by itself: recorded runs depend on it."""
    seeds, device = [3, 0, 2**40], torch.device("cpu")
    keys = rng.epoch_keys(seeds, 3, task=2, epoch=7, device=device)
    wanted = [rng.stream_key(torch.tensor(seeds), purpose, 2, 7) for purpose in ("augment", "order", "drop", "drawn")]
    rows = [rng.stream_key(wanted[0], "row", k) for k in range(3)]
    assert torch.equal(keys, torch.stack([*wanted, *rows]))
    assert torch.equal(keys[4:], rng.row_keys(wanted[0], 3))
    for seed in (*seeds, 2**63 - 1):
        key = rng.stream_key(torch.tensor([seed]), "dropout", 2, 7)
        assert rng.one_seed(seed, "dropout", 2, 7) == int(key) & (2**63 - 1)


PINNED = [294, 846, 360, 19, 321]
