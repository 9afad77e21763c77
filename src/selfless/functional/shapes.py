"""Shapes and precision: how every formula prepares its arguments."""

from __future__ import annotations

import torch
from torch import Tensor


def samples(h: Tensor, absolute: bool = False) -> Tensor:
    """Return `h` as (samples, neurons) in at least float32; tokens and positions become samples. If `absolute`, return |h|."""
    if h.dim() == 3:
        h = h.flatten(0, 1)
    elif h.dim() >= 4:
        h = h.movedim(1, -1).flatten(0, -2)
    elif h.dim() != 2:
        raise ValueError(
            f"h has shape {tuple(h.shape)}; expected (samples, neurons), (batch, tokens, neurons) or (batch, channels, height, "
            f"width). For a single sample pass h.unsqueeze(0)."
        )
    h = wide(h)
    return h.abs() if absolute else h


def wide(x: Tensor) -> Tensor:
    """Return x in float32 if it is float16 or bfloat16, else x itself."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def without_autocast(like: Tensor) -> torch.autocast:
    """Switch autocast off: the formulas subtract large sums, and half precision would lose the difference."""
    return torch.autocast(like.device.type, enabled=False)


def is_finite(x: Tensor) -> bool:
    """Return True if no entry is NaN or infinite. The sum tells it without a copy of x; only a sum that overflows needs a closer look."""
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())
