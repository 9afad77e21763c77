"""The buffers of a model that training may change, by their sums."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def lasting_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the sum of each saved buffer of several real numbers; running statistics have a warning of their own."""
    for prefix, module in model.named_modules():
        for key, b in module._buffers.items() if not isinstance(module, nn.modules.batchnorm._NormBase) else ():
            is_known = isinstance(b, Tensor) and not isinstance(b, nn.parameter.UninitializedBuffer)
            if b is None or not is_known or key in module._non_persistent_buffers_set:
                continue
            if b.is_floating_point() and b.layout is torch.strided and not b.is_nested and not b.is_meta and b.numel() > 1:
                yield f"{prefix}.{key}".lstrip("."), b.detach().sum(dtype=torch.float32)
