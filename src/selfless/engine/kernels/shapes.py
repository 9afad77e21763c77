"""The layout of feature maps in the kernels, and the sizes of blocks."""

from __future__ import annotations

import torch
import triton
from torch import Tensor


def channels_last(x: Tensor) -> Tensor:
    """Return (F, B, C, H, W) in the layout of the kernels: (F, B, H, W, C), contiguous."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def is_flat(inputs: int) -> bool:
    """True for few input channels: one matrix product then covers all taps and channels."""
    return 9 * inputs <= 32


def tile(n: int) -> int:
    """Return the smallest block size ≥ n that matrix units accept: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(n))


def precision() -> str:
    """Return how `tl.dot` multiplies float32, after the setting of PyTorch."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
