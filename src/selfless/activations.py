"""Maxout and LWTA: activations in which adjacent units compete. The paper compares its penalties with them.

The units are the last dimension of (M, N) and (M, T, N), and the channels (dimension 1) of (M, C, H, W). Window j of width w, by default 2,
holds the adjacent units g_j = {w·j, …, w·j + w − 1}. The code branches on shapes only, never on values, so that it runs under
`torch.func.vmap` and `torch.compile`.
"""

import torch
from torch import Tensor, nn

__all__ = ["LWTA", "Maxout", "lwta", "maxout"]


def maxout(x: Tensor, window: int = 2) -> Tensor:
    """h_j = max_{i ∈ g_j} x_i,   (M, N) → (M, N/w): Goodfellow et al. 2013. In a tie only the first unit gets the gradient."""
    dim = _unit_dim(x, window)
    return _split(x, dim, window).max(dim + 1).values


def lwta(x: Tensor, window: int = 2) -> Tensor:
    """h_i = x_i · [i = argmax_{k ∈ g(i)} x_k],   (M, N) → (M, N): Srivastava et al. 2013.

    The winner of each window keeps its value, also a negative one; the others become zero. In a tie the first unit wins.
    """
    dim = _unit_dim(x, window)
    groups = _split(x, dim, window)
    index = torch.arange(window, device=x.device).view(-1, *[1] * (x.ndim - 1 - dim))
    winner = index == groups.argmax(dim + 1, keepdim=True)
    return torch.where(winner, groups, torch.zeros_like(groups)).flatten(dim, dim + 1)


class _WindowActivation(nn.Module):
    """An activation over windows of `window` adjacent units."""

    def __init__(self, window: int = 2) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"window must be at least 1, not {window}")
        self.window = window

    def extra_repr(self) -> str:
        return f"window={self.window}"


class Maxout(_WindowActivation):
    """h_j = max_{i ∈ g_j} x_i: (M, N) → (M, N/w), (M, C, H, W) → (M, C/w, H, W). See `maxout`."""

    def forward(self, x: Tensor) -> Tensor:
        return maxout(x, self.window)


class LWTA(_WindowActivation):
    """h_i = x_i · [i = argmax_{k ∈ g(i)} x_k]: local winner-take-all; keeps the shape. See `lwta`."""

    def forward(self, x: Tensor) -> Tensor:
        return lwta(x, self.window)


def _unit_dim(x: Tensor, window: int) -> int:
    """Return the dimension of the units, after checking that it divides into windows."""
    if x.ndim == 0:
        raise ValueError("expected units in the shape (M, N), (M, T, N) or (M, C, H, W), not a scalar")
    dim = 1 if x.ndim == 4 else x.ndim - 1
    if window < 1 or x.shape[dim] % window:
        raise ValueError(
            f"{x.shape[dim]} units (dimension {dim} of {tuple(x.shape)}) do not divide into windows of {window}; "
            "choose a layer width that is a multiple of the window"
        )
    return dim


def _split(x: Tensor, dim: int, window: int) -> Tensor:
    """(…, N, …) → (…, N/w, w, …): split the units into windows."""
    return x.reshape(*x.shape[:dim], x.shape[dim] // window, window, *x.shape[dim + 1 :])
