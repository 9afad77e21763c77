"""A forward pass written for stacked parameters, layer by layer, where `vmap` would be slower.

Covers plain nn.Sequential networks of the usual layers, which all of the paper's are: a linear layer is one batched matmul with its bias
added inside, pointwise layers see the stack as it is, pooling sees members as more samples, and a convolution runs member by member (as
one grouped convolution, which is what `vmap` makes of it, it is no quicker than that: docs/lab-notes.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfless.activations import LWTA, Maxout

Tensors = dict[str, Tensor]

_POINTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity, nn.Dropout)
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b for every member. Its own backward, so that ∂W comes out laid out as W is (autograd would give a transposed view of it,
    on which the update over lists of tensors falls back to one slow operation a tensor)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx, dw, db = ctx.needs_input_grad
        return torch.bmm(g, weight) if dx else None, torch.bmm(g.mT, x) if dw else None, g.sum(1) if db else None


def _linear(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.dim() != 3 or bias is None or torch.is_autocast_enabled(x.device.type):
        return torch.func.vmap(F.linear)(x, weight, bias) if bias is not None else torch.func.vmap(F.linear)(x, weight)
    result: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


def _conv(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    each = [layer._conv_forward(xs, w, None if bias is None else bias[f]) for f, (xs, w) in enumerate(zip(x, weight, strict=True))]
    return torch.stack(each)


_WEIGHTED: dict[type[nn.Module], Callable[..., Tensor]] = {nn.Linear: _linear, nn.Conv2d: _conv}


def native(module: nn.Module) -> bool:
    """Whether every layer of the module is one that `forward` knows."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return False
    if len(list(module.named_parameters(remove_duplicate=False))) != len(list(module.named_parameters())):
        return False  # tied weights stand under one name only
    known = (*_WEIGHTED, *_POINTWISE, *_POOLS, nn.Flatten, Maxout, LWTA)
    return all(type(layer) in known and _plain(layer) for layer in module) and len(set(module)) == len(module)


def _plain(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Flatten):
        return layer.start_dim == 1 and layer.end_dim == -1
    return set(layer._parameters) <= {"weight", "bias"} and not getattr(layer, "inplace", False)


def forward(module: nn.Module, params: Tensors, nudges: Tensors, x: Tensor, inputs: Tensors) -> Tensor:
    """x (F, B, …) through the layers; a weighted layer's input is kept in `inputs` where a nudge is added to its output."""
    for name, layer in module.named_children():
        weighted = _WEIGHTED.get(type(layer))
        if weighted is not None:
            given, x = x, weighted(layer, x, params[f"{name}.weight"], params.get(f"{name}.bias"))
            if name in nudges:
                inputs[name], x = given, x + nudges[name]
        elif isinstance(layer, nn.Flatten):
            x = x.flatten(2)
        elif isinstance(layer, _POOLS) or (isinstance(layer, (Maxout, LWTA)) and x.dim() > 3):
            pooled = layer(x.flatten(0, 1))
            x = pooled.view(*x.shape[:2], *pooled.shape[1:])
        else:
            x = layer(x)
    return x
