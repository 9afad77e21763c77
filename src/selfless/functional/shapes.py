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


def classes_last(output: Tensor, labels: Tensor) -> Tensor:
    """Return outputs (M, C, H, W) with class numbers (M, H, W), as F.cross_entropy takes them, as (M, H, W, C); others unchanged."""
    fits = not labels.is_floating_point() and labels.dim() == output.dim() - 1 > 1 and output.shape[2:] == labels.shape[1:]
    return output.movedim(1, -1) if fits and (output.dim() > 3 or output.shape[:-1] != labels.shape) else output


def has_known_classes(output: Tensor, labels: Tensor | None) -> bool:
    """Return True if it is known which axis of an output has the classes: the last one, unless labels say that it is axis 1."""
    rows = None if labels is None else labels.shape
    return output.dim() < 4 or rows in (output.shape, output.shape[:-1], output.shape[:1] + output.shape[2:])


def without_autocast(like: Tensor) -> torch.autocast:
    """Switch autocast off: the formulas subtract large sums, and half precision would lose the difference."""
    return torch.autocast(like.device.type, enabled=False)


def is_finite(x: Tensor) -> bool:
    """Return True if no entry is NaN or infinite. The sum tells it without a copy of x; only a sum that overflows needs a closer look."""
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def has_mkl() -> bool:
    """Return True if PyTorch multiplies matrices on the CPU with MKL, which is equally fast for all layouts. OpenBLAS is not."""
    return bool(torch.backends.mkl.is_available())


def transposed(x: Tensor) -> Tensor:
    """Return xᵀ of the last two axes. On a CPU without MKL it is a copy: OpenBLAS multiplies by a copy faster than by a view."""
    return x.mT if x.is_cuda or has_mkl() else x.mT.contiguous()
