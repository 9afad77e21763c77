"""Autograd functions of stacked layers, with their own backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from selfless.engine.native.hardware import HAS_OUT_DTYPE, kernels, memory_of
from selfless.engine.native.options import Measure, PairGradient
from selfless.importance import closed
from selfless.importance.reducer import MEMORY


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


# ---------------------------------------------------------------------------------------------------------------------- layers
class StackedLinear(torch.autograd.Function):
    """y = x Wᵀ + b for every member, and its ReLU if asked: (F, B, …, D) → (F, B, …, N). ∂W comes out laid out as W is."""

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
        made: Tensor = y.view(*x.shape[:-1], y.shape[-1])
        return made

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
            dw = _bmm_wide(g.mT, rows)
        if measure is None and wants_b and db is None:
            db = g.sum(1, dtype=torch.float32)
        return dx, dw if wants_w else None, db if wants_b else None, None, None, None


def _linear_magnitudes(rows: Tensor, g: Tensor, shape: torch.Size, power: int, positive: bool) -> tuple[Tensor, Tensor]:
    """Σ_m |δ_m a_mᵀ|ᵖ and Σ_m |δ_m|ᵖ: one matmul, |δ|ᵀ|a|, where a sample has one position."""
    if len(shape) == 3:
        sizes = closed.power_of(g, power)
        inputs = rows if positive and power == 1 else closed.power_of(rows, power)
        return _bmm_wide(sizes.mT, inputs), sizes.sum(1, dtype=torch.float32)
    each = torch.matmul(g.flatten(2, -2).mT, rows.view(*shape[:2], -1, shape[-1])).float()  # (F, B, N, D)
    return closed.power_of(each, power).sum(1), closed.power_of(g.flatten(2, -2).sum(2), power).sum(1)


def _bmm_wide(a: Tensor, b: Tensor) -> Tensor:
    """The product in float32, also of half precisions."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda and HAS_OUT_DTYPE else torch.bmm(a, b).float()


class TritonConv(torch.autograd.Function):
    """A 3×3 convolution in Triton. With `relu` its output is rectified and the gradient it is given is masked already; `owed`: so was x,
    and the gradient it gives is masked by x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, relu: bool, owed: bool, measure: Measure | None
    ) -> Tensor:
        fast = kernels(x)
        assert fast is not None
        ctx.save_for_backward(x, weight)
        ctx.padding, ctx.owed, ctx.measure = padding, owed, measure
        taps = _taps_first(weight.permute(0, 3, 4, 1, 2), x.dtype)
        y: Tensor = fast.conv(x, taps, bias, padding, relu=relu)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        fast, measure = kernels(g), ctx.measure
        assert fast is not None
        wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if wants_x:
            taps = _taps_first(weight.permute(0, 3, 4, 2, 1), x.dtype)
            dx = fast.conv(g, taps, None, 2 - ctx.padding, mask=x if ctx.owed else None, flip=True)
        if wants_w or wants_b:
            given = g if measure is None else measure.weighted(g)
            dw, db = fast.weight_sums(x, given, ctx.padding, 0 if measure is None else measure.power)
        return dx, dw if wants_w else None, db if wants_b else None, None, None, None, None


def _taps_first(taps: Tensor, dtype: torch.dtype) -> Tensor:
    """(F, 3, 3, O, C), permuted and perhaps of another type → (F, 9, O, C), in one copy."""
    made = torch.empty(taps.shape, dtype=dtype, device=taps.device).copy_(taps)
    return made.flatten(1, 2)


class MemberConv(torch.autograd.Function):
    """Any other convolution, member by member; on a GPU channels last, which the weights decide for all that follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Conv2d, measure: Measure | None) -> Tensor:
        low, shift = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        if x.is_cuda:
            low = low.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
        ctx.save_for_backward(x, low)
        ctx.layer, ctx.measure = layer, measure
        each = [layer._conv_forward(xs, w, None if shift is None else shift[f]) for f, (xs, w) in enumerate(zip(x, low, strict=True))]
        return _restack(each)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer, measure = ctx.layer, ctx.measure
        wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
        sizes = measure is not None
        size = [weight.shape[1]] if wants_b and not sizes else None
        flags = [wants_x, wants_w and not sizes, wants_b and not sizes]
        shape = (layer.stride, layer.padding, layer.dilation, False, [0, 0], layer.groups)
        found = [torch.ops.aten.convolution_backward(g[f], x[f], weight[f], size, *shape, flags) for f in range(len(x))]
        dx = _restack([each[0] for each in found]) if wants_x else None
        dw: Tensor | None
        db: Tensor | None
        if sizes and (wants_w or wants_b):
            scaled = measure.weighted(g).float()
            room = memory_of(x.device) // 64 if x.is_cuda else MEMORY
            rules = [dict(closed.conv(layer, x[f].float(), scaled[f], measure.power, room)) for f in range(len(x))]
            dw = torch.stack([r["weight"] for r in rules])
            db = torch.stack([r["bias"] for r in rules]) if wants_b else None
        else:
            dw = torch.stack([each[1] for each in found]).float() if wants_w else None
            db = torch.stack([each[2] for each in found]).float() if wants_b else None
        return dx, dw if wants_w else None, db if wants_b else None, None, None


def _restack(each: list[Tensor]) -> Tensor:
    """One tensor of all members, in the layout that their convolutions chose."""
    return torch.cat(each).view(len(each), *each[0].shape)


class TritonPool(torch.autograd.Function):
    """2×2 maxima in Triton."""

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
    """h as it is; on the way back the penalty's gradient joins in. Positions of a feature map count as samples; a map stays in its own
    precision where it can, since it is its bytes that cost."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, inhibition: PairGradient) -> Tensor:
        ctx.save_for_backward(h)
        ctx.inhibition = inhibition
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (h,) = ctx.saved_tensors
        axis = 2 if h.dim() > 4 else -1
        dtype = g.dtype if h.dim() > 4 and ctx.inhibition.matrix is not None else torch.float32
        flat, shape = h.movedim(axis, -1).flatten(1, -2).to(dtype), g.movedim(axis, -1).shape
        total = ctx.inhibition.add_to(g.movedim(axis, -1).reshape(flat.shape).to(dtype), flat)
        return total.view(shape).movedim(-1, axis).to(g.dtype), None


class Probe(torch.autograd.Function):
    """n as it is; the "gradient" of the probe is Σ_m |∂L_m/∂n| of each neuron, positions averaged."""

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
