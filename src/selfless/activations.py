"""Activations that inhibit within windows of adjacent units: Maxout and LWTA, the paper's competitors to a penalty.

Units are the last dimension of (M, N) and (M, T, N), and the channels, dimension 1, of (M, C, H, W). Window w, by default 2:
g = {w·j, …, w·j + w − 1} is the j-th window of adjacent units. Shapes alone decide what is computed, so all of it works under
`torch.func.vmap` and `torch.compile`.
"""

import torch
from torch import Tensor, nn

__all__ = ["LWTA", "Maxout", "lwta", "maxout"]


def maxout(x: Tensor, window: int = 2) -> Tensor:
    """h_j = max_{i ∈ g_j} x_i,   (M, N) → (M, N/w): Goodfellow et al. 2013. A tie passes its gradient to the first alone."""
    dim = _units(x, window)
    return _grouped(x, dim, window).max(dim + 1).values


def lwta(x: Tensor, window: int = 2) -> Tensor:
    """h_i = x_i · [i = argmax_{k ∈ g(i)} x_k],   (M, N) → (M, N): Srivastava et al. 2013.

    The winner of each window keeps its value, whatever its sign, the others are zero. A tie has one winner: the first.
    """
    dim = _units(x, window)
    groups = _grouped(x, dim, window)
    place = torch.arange(window, device=x.device).view(-1, *[1] * (x.ndim - 1 - dim))
    winner = place == groups.argmax(dim + 1, keepdim=True)
    return torch.where(winner, groups, torch.zeros_like(groups)).flatten(dim, dim + 1)


class _Windowed(nn.Module):
    def __init__(self, window: int = 2) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"window must be at least 1, not {window}")
        self.window = window

    def extra_repr(self) -> str:
        return f"window={self.window}"


class Maxout(_Windowed):
    """h_j = max_{i ∈ g_j} x_i: (M, N) → (M, N/w), (M, C, H, W) → (M, C/w, H, W). See `maxout`."""

    def forward(self, x: Tensor) -> Tensor:
        return maxout(x, self.window)


class LWTA(_Windowed):
    """h_i = x_i · [i = argmax_{k ∈ g(i)} x_k]: local winner-take-all, the shape is kept. See `lwta`."""

    def forward(self, x: Tensor) -> Tensor:
        return lwta(x, self.window)


def _units(x: Tensor, window: int) -> int:
    """The dimension that holds the units, after checking that windows fill it."""
    if x.ndim == 0:
        raise ValueError("a window needs units: (M, N), (M, T, N) or (M, C, H, W), not a scalar")
    dim = 1 if x.ndim == 4 else x.ndim - 1
    if window < 1 or x.shape[dim] % window:
        raise ValueError(
            f"{x.shape[dim]} units (dimension {dim} of {tuple(x.shape)}) do not divide into windows of {window}; "
            "choose a layer width that is a multiple of the window"
        )
    return dim


def _grouped(x: Tensor, dim: int, window: int) -> Tensor:
    """(…, N, …) → (…, N/w, w, …)."""
    return x.reshape(*x.shape[:dim], x.shape[dim] // window, window, *x.shape[dim + 1 :])
