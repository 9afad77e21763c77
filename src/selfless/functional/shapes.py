"""Shapes and precision: what every formula does to its arguments first."""

from __future__ import annotations

import torch
from torch import Tensor


def samples(h: Tensor, absolute: bool = False) -> Tensor:
    """`h` as (samples, neurons) in float32 or wider: tokens and positions become samples. |h| when `absolute`."""
    if h.dim() == 3:
        h = h.flatten(0, 1)
    elif h.dim() >= 4:
        h = h.movedim(1, -1).flatten(0, -2)
    elif h.dim() != 2:
        raise ValueError(
            f"h has shape {tuple(h.shape)}; expected (samples, neurons), (batch, tokens, neurons) or (batch, channels, height, "
            f"width). Unflatten a single sample with h.unsqueeze(0)."
        )
    h = wide(h)
    return h.abs() if absolute else h


def wide(x: Tensor) -> Tensor:
    """x in float32 if it is in half precision, else as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def without_autocast(like: Tensor) -> torch.autocast:
    """Switch autocast off: the penalty is small beside the loss, and half precision would lose its differences."""
    return torch.autocast(like.device.type, enabled=False)
