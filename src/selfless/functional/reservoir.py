"""A uniform draw from a stream of unknown length, by random keys."""

from __future__ import annotations

from torch import Tensor


def reservoir(keys: Tensor, samples: int) -> Tensor:
    """argsort(keys)[: samples]: the positions of the smallest `keys` (…, n), smallest first, (…, min(samples, n)).

    Give every sample of a stream its own uniform random key, and keep those with the smallest keys. At any time they are a uniform draw
    without replacement from all samples so far: each of n samples is kept with probability samples/n. This is the law of reservoir
    sampling (Vitter, 1985), and it holds for parts of the stream too: the smallest of the smallest keys are the smallest keys.
    """
    return keys.argsort(-1)[..., :samples]
