"""Autograd functions for stacked layers. With a `Measure`, the backward pass returns Σ_m |∂L_m/∂θ|ᵖ instead of the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from selfless.engine.native.hardware import kernels, memory_of
from selfless.engine.native.options import Measure, Penalty, bmm_wide
from selfless.importance import closed
from selfless.importance.reducer import MEMORY


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Return function.apply(*arguments), with a type."""
    result: Tensor = function.apply(*arguments)
    return result


# ---------------------------------------------------------------------------------------------------------------------- layers
class StackedLinear(torch.autograd.Function):
    """y = x Wᵀ + b for every member, with a ReLU if `relu`: (F, B, …, D) → (F, B, …, N). ∂W has the memory layout of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool, measure: Measure | None, positive: bool) -> Tensor:
        rows, low, fast = x.flatten(1, -2), weight.to(x.dtype), kernels(x)
        if fast is not None and bias is not None:
            y = fast.bias_(torch.bmm(rows, low.mT), bias, relu)
        else:
            y = torch.bmm(rows, low.mT) if bias is None else torch.baddbmm(bias.to(x.dtype).unsqueeze(1), rows, low.mT)
            y = y.relu_() if relu else y
        ctx.save_for_backward(rows, low, y if relu else None)
        ctx.shape, ctx.positive, ctx.measure = x.shape, positive, measure
        output: Tensor = y.view(*x.shape[:-1], y.shape[-1])
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, y = ctx.saved_tensors
        wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
        g, db, measure = grad.reshape(*rows.shape[:2], -1), None, ctx.measure
        fast = kernels(g)
        if fast is not None and wants_b and measure is None:
            g, db = fast.unbias(g.contiguous(), y)
        else:
            g = g if y is None else torch.ops.aten.threshold_backward(g, y, 0)
        dx = torch.bmm(g, weight).view(ctx.shape) if wants_x else None
        dw = None
        if measure is not None and (wants_w or wants_b):
            dw, db = _linear_magnitudes(rows, measure.weighted(g.view(*ctx.shape[:-1], -1)), ctx.shape, measure.power, ctx.positive)
        elif wants_w:
            dw = bmm_wide(g.mT, rows)
        if measure is None and wants_b and db is None:
            db = g.sum(1, dtype=torch.float32)
        return dx, dw if wants_w else None, db if wants_b else None, None, None, None


def _linear_magnitudes(rows: Tensor, g: Tensor, shape: torch.Size, power: int, positive: bool) -> tuple[Tensor, Tensor]:
    """Return Σ_m |δ_m a_mᵀ|ᵖ and Σ_m |δ_m|ᵖ. With one position per sample the first is one matmul, |δ|ᵀ|a|."""
    if len(shape) == 3:
        sizes = closed.power_of(g, power)
        inputs = rows if positive and power == 1 else closed.power_of(rows, power)
        return bmm_wide(sizes.mT, inputs), sizes.sum(1, dtype=torch.float32)
    each = torch.matmul(g.flatten(2, -2).mT, rows.view(*shape[:2], -1, shape[-1])).float()  # (F, B, N, D)
    return closed.power_of(each, power).sum(1), closed.power_of(g.flatten(2, -2).sum(2), power).sum(1)


class TritonConv(torch.autograd.Function):
    """A 3×3 convolution in Triton.

    relu      apply a ReLU to the output; the layer after it masks the gradient
    owed      x is the output of such a convolution: mask the gradient of x where x is 0
    penalty   a penalty on x, whose gradient is added to that of x
    trains    a backward pass will follow
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        padding: int,
        relu: bool,
        owed: bool,
        measure: Measure | None,
        penalty: Penalty | None,
        trains: bool,
    ) -> Tensor:
        fast = kernels(x)
        assert fast is not None
        columns = fast.columns_of(x, padding) if trains else None
        ctx.save_for_backward(x, weight, columns)
        ctx.padding, ctx.owed, ctx.measure, ctx.penalty = padding, owed, measure, penalty
        kernel = _flatten_kernel(weight.permute(0, 3, 4, 1, 2), x.dtype)
        y: Tensor = fast.conv(x, kernel, bias, padding, relu=relu, columns=columns)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, columns = ctx.saved_tensors
        fast, measure = kernels(g), ctx.measure
        assert fast is not None
        wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if wants_x:
            kernel = _flatten_kernel(weight.permute(0, 3, 4, 2, 1), x.dtype)
            pairs = None
            if ctx.penalty is not None and ctx.penalty.switch.on:
                pairs = (x, *ctx.penalty.as_product(x.movedim(2, -1).flatten(1, -2)))
            dx = fast.conv(g, kernel, None, 2 - ctx.padding, mask=x if ctx.owed else None, flip=True, pairs=pairs)
        if wants_w or wants_b:
            weighted = g if measure is None else measure.weighted(g)
            dw, db = fast.weight_sums(x, weighted, ctx.padding, 0 if measure is None else measure.power, columns)
        return dx, dw if wants_w else None, db if wants_b else None, None, None, None, None, None, None


def _flatten_kernel(kernel: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a permuted kernel (F, 3, 3, O, C) as contiguous (F, 9, O, C) of this type, in one copy."""
    copy = torch.empty(kernel.shape, dtype=dtype, device=kernel.device).copy_(kernel)
    return copy.flatten(1, 2)


class MemberConv(torch.autograd.Function):
    """Any other convolution, member by member. On a GPU the weights are channels-last, so outputs and later layers are, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Conv2d, measure: Measure | None) -> Tensor:
        low, shift = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        if x.is_cuda:
            low = low.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
        ctx.save_for_backward(x, low)
        ctx.layer, ctx.measure = layer, measure
        outputs = [layer._conv_forward(xs, w, None if shift is None else shift[f]) for f, (xs, w) in enumerate(zip(x, low, strict=True))]
        return _restack(outputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer, measure = ctx.layer, ctx.measure
        wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
        measures = measure is not None
        size = [weight.shape[1]] if wants_b and not measures else None
        flags = [wants_x, wants_w and not measures, wants_b and not measures]
        shape = (layer.stride, layer.padding, layer.dilation, False, [0, 0], layer.groups)
        found = [torch.ops.aten.convolution_backward(g[f], x[f], weight[f], size, *shape, flags) for f in range(len(x))]
        dx = _restack([each[0] for each in found]) if wants_x else None
        dw: Tensor | None
        db: Tensor | None
        if measures and (wants_w or wants_b):
            weighted = measure.weighted(g).float()
            memory = memory_of(x.device) // 64 if x.is_cuda else MEMORY
            sums = [dict(closed.conv(layer, x[f].float(), weighted[f], measure.power, memory)) for f in range(len(x))]
            dw = torch.stack([s["weight"] for s in sums])
            db = torch.stack([s["bias"] for s in sums]) if wants_b else None
        else:
            dw = torch.stack([each[1] for each in found]).float() if wants_w else None
            db = torch.stack([each[2] for each in found]).float() if wants_b else None
        return dx, dw if wants_w else None, db if wants_b else None, None, None


def _restack(each: list[Tensor]) -> Tensor:
    """Return the members as one tensor, in the memory layout that their convolutions chose."""
    return torch.cat(each).view(len(each), *each[0].shape)


class TritonPool(torch.autograd.Function):
    """2×2 max-pooling in Triton; `owed` as in `TritonConv`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owed: bool) -> Tensor:
        fast = kernels(x)
        assert fast is not None
        ctx.save_for_backward(x)
        ctx.owed = owed
        y: Tensor = fast.pool(x)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        fast = kernels(g)
        assert fast is not None
        return fast.unpool(x, g, ctx.owed), None


class Inhibit(torch.autograd.Function):
    """The identity on h; the backward pass adds the gradient of a penalty. `owed` as in `TritonConv`.

    Positions of a feature map count as samples. A feature map is computed in its own precision where possible, because the time is spent
    on reading its memory.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, inhibition: Penalty, owed: bool) -> Tensor:
        ctx.save_for_backward(h)
        ctx.inhibition, ctx.owed = inhibition, owed
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (h,) = ctx.saved_tensors
        axis = 2 if h.dim() > 4 else -1
        dtype = g.dtype if h.dim() > 4 and ctx.inhibition.any_precision else torch.float32
        flat, shape = h.movedim(axis, -1).flatten(1, -2).to(dtype), g.movedim(axis, -1).shape
        total = ctx.inhibition.add_to(g.movedim(axis, -1).reshape(flat.shape).to(dtype), flat, ctx.owed)
        return total.view(shape).movedim(-1, axis).to(g.dtype), None, None


class Probe(torch.autograd.Function):
    """The identity on n; the "gradient" of the probe (F, N) is Σ_m |∂L_m/∂n| of each neuron, averaged over positions."""

    @staticmethod
    def forward(ctx: Any, n: Tensor, probe: Tensor, weights: Measure | None) -> Tensor:
        ctx.weights = weights
        return n.view_as(n)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        sizes, weights = g.abs().float(), ctx.weights
        if weights is not None and weights.rows is not None:
            sizes = sizes * weights.rows.view(*sizes.shape[:2], *[1] * (sizes.dim() - 2))
        sizes = sizes.movedim(2 if sizes.dim() > 4 else -1, -1)
        return g, (sizes.flatten(2, -2).mean(2) if sizes.dim() > 3 else sizes).sum(1), None
