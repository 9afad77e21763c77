"""Batch normalisation of stacked members: each normalises by its own statistics, as the module does alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


def is_plain_norm(layer: nn.Module) -> bool:
    """Return True for batch norm that `batch_norm` can run; with momentum None its running statistics are means over all steps."""
    return type(layer) in NORMS and isinstance(layer, NORMS) and (layer.momentum is not None or not layer.track_running_stats)


def batch_norm(layer: nn.Module, name: str, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return layer(x_f) of every member for x (F, B, …). In training running statistics, which are among the buffers, are updated."""
    assert isinstance(layer, NORMS)
    mean, var = buffers.get(f"{name}.running_mean"), buffers.get(f"{name}.running_var")
    by_batch, momentum = layer.training or mean is None, layer.momentum or 0.0
    if layer.training and not layer.track_running_stats:  # as the module does: they are kept for evaluation
        mean = var = None
    elif layer.training and f"{name}.num_batches_tracked" in buffers:
        buffers[f"{name}.num_batches_tracked"].add_(1)
    scales = (params.get(f"{name}.{part}") for part in ("weight", "bias"))
    each = zip(x.unbind(), *(_members(t, len(x)) for t in (mean, var, *scales)), strict=True)
    return torch.stack([F.batch_norm(h, m, v, weight, bias, by_batch, momentum, layer.eps) for h, m, v, weight, bias in each])


def _members(stacked: Tensor | None, count: int) -> Sequence[Tensor | None]:
    return [None] * count if stacked is None else stacked.unbind()
