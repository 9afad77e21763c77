"""Seeded choices are the same on every machine."""

from __future__ import annotations

import hashlib

import numpy as np

from selfless.data.rng import draw_order, draw_uniform, split_by_class

PINNED_ORDER = [1, 3, 2, 0, 4]
PINNED_ANGLES = [0.905262, 0.912344, 0.905747]
PINNED = {
    "permutation 0": "4901e6bec746f09a",
    "permutation 1": "6d80964b294abf1f",
    "classes": "1871724c59f7a0e5",
    "held-out": "2dbf61bef515bcdd",
}


def fingerprint(values: object) -> str:
    return hashlib.sha256(np.asarray(values, dtype="<i8").tobytes()).hexdigest()[:16]


def test_seeded_choices_are_the_same_on_every_machine() -> None:
    """Pinned values: if one of them changes, every stream changes, and recorded results no longer hold."""
    assert draw_order(5, 0, "permutation", 1).tolist() == PINNED_ORDER
    assert fingerprint(draw_order(784, 0, "permutation", 1)) == PINNED["permutation 0"]
    assert fingerprint(draw_order(784, 1, "permutation", 4)) == PINNED["permutation 1"]
    assert fingerprint(draw_order(100, 0, "class order")) == PINNED["classes"]
    assert fingerprint(split_by_class(np.arange(1000) % 10, 0.1, 3, "held-out")[1]) == PINNED["held-out"]
    assert [round(float(u), 6) for u in draw_uniform(3, 0, "angle")] == PINNED_ANGLES
