"""Autograd functions for stacked layers. With a `Measure`, the backward pass returns Σ_m |∂L_m/∂θ|ᵖ instead of the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from selfless.engine.native.hardware import kernels, memory_of, side_by_side
from selfless.engine.native.options import Measure, Penalty, bmm_wide
from selfless.functional.shapes import transposed
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
            turned = transposed(low)
            y = torch.bmm(rows, turned) if bias is None else torch.baddbmm(bias.to(x.dtype).unsqueeze(1), rows, turned)
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
    """Any other convolution, member by member. On a GPU the weights are channels-last, so outputs and later layers are, too.

    With kernels, the pass that stacks the members also adds the bias and applies the ReLU (if `relu`), and in the backward pass the mask
    that is `owed`. As in `TritonConv`, after `relu` the layer after this one masks the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Conv2d, measure: Measure | None, relu: bool, owed: bool
    ) -> Tensor:
        low, fast = weight.to(x.dtype), kernels(x)
        if x.is_cuda:
            low = low.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
        ctx.save_for_backward(x, low)
        ctx.layer, ctx.measure, ctx.owed = layer, measure, owed
        shift = [None] * len(x) if bias is None or fast is not None else list(bias.to(x.dtype))
        outputs = side_by_side(lambda f: layer._conv_forward(x[f], low[f], shift[f]), len(x))
        if fast is None:
            return _restack(outputs)
        biases = weight.new_zeros(*weight.shape[:2]) if bias is None else bias
        return _stack_last(outputs, lambda f, z, to: fast.bias_(z, biases[f : f + 1], relu, out=to))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer, measure, fast = ctx.layer, ctx.measure, kernels(g)
        wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
        measures = measure is not None
        size = [weight.shape[1]] if wants_b and not measures and fast is None else None
        flags = [wants_x, wants_w and not measures, size is not None]
        shape = (layer.stride, layer.padding, layer.dilation, False, [0, 0], layer.groups)
        g = g if fast is None else g.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
        found = side_by_side(lambda f: torch.ops.aten.convolution_backward(g[f], x[f], weight[f], size, *shape, flags), len(x))
        dx = dw = db = None
        if wants_x and fast is not None and ctx.owed:
            rows = x.permute(0, 1, 3, 4, 2).contiguous()
            dx = _stack_last([each[0] for each in found], lambda f, d, to: fast.masked_into(d, rows[f], to))
        elif wants_x:
            dx = _restack([each[0] for each in found])
        if measures and (wants_w or wants_b):
            dw, db = _conv_magnitudes(layer, x, measure.weighted(g), measure.power)
        else:
            dw = torch.stack([each[1] for each in found]).float() if wants_w else None
            if wants_b and fast is not None:
                db = fast.unbias(g.permute(0, 1, 3, 4, 2).flatten(1, 3), None)[1]
            elif wants_b:
                db = torch.stack([each[2] for each in found]).float()
        return dx, dw if wants_w else None, db if wants_b else None, None, None, None, None


def _conv_magnitudes(layer: nn.Conv2d, x: Tensor, g: Tensor, power: int) -> tuple[Tensor, Tensor | None]:
    """Return Σ_m |∂_m|^power of the weight (F, O, C, …) and of the bias (F, O) of a convolution, given ∂/∂output."""
    fast = kernels(g)
    if fast is not None and layer.groups == 1:
        return fast.magnitudes(x, g, layer, power), g.float().sum((3, 4)).abs().pow(power).sum(1)
    memory = memory_of(x.device) // 64 if x.is_cuda else MEMORY
    sums = [dict(closed.conv(layer, x[f].float(), g[f].float(), power, memory)) for f in range(len(x))]
    return torch.stack([s["weight"] for s in sums]), torch.stack([s["bias"] for s in sums]) if layer.bias is not None else None


def _restack(each: list[Tensor]) -> Tensor:
    """Return the members as one tensor, in the memory layout that their convolutions chose."""
    return torch.cat(each).view(len(each), *each[0].shape)


def _stack_last(each: list[Tensor], write: Callable[[int, Tensor, Tensor], object]) -> Tensor:
    """Return the members as one tensor, channels last in memory. write(f, z, to) writes what becomes of z = each[f] (1, B, H, W, C)."""
    last = [z.permute(0, 2, 3, 1).contiguous().unsqueeze(0) for z in each]  # copies nothing if a member is channels-last
    stacked = torch.empty(len(each), *last[0].shape[1:], dtype=last[0].dtype, device=last[0].device)
    for f, z in enumerate(last):
        write(f, z, stacked[f : f + 1])
    return stacked.permute(0, 1, 4, 2, 3)


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
