"""A forward pass written for stacked parameters, layer by layer, with a backward pass of its own.

Covers plain nn.Sequential networks of the usual layers, also within one another, which all of the paper's are. A linear layer is one
batched matmul, pointwise layers see the stack as it is, pooling sees members as more samples, and a convolution runs member by member, or
on a GPU (3×3, at most 64 channels) for all members in one kernel of `selfless.engine.kernels`: docs/lab-notes.md compares the ways. Two
things ride on the way back:

    inhibition   a penalty hᵀSh/M has the gradient 2Sh/M, so a layer with S adds one matmul to the gradient that passes it: `Inhibition`
    importance   with a `Measure` the "gradient" of a parameter is Σ_m |∂L_m/∂θ|ᵖ, and that of a probe (F, N) is Σ_m |∂L_m/∂n|: one pass
                 of `torch.autograd.grad` gives Ω and α of every member
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfless.activations import LWTA, Maxout
from selfless.importance import closed
from selfless.importance.persample import MEMORY

if TYPE_CHECKING:
    from types import ModuleType

Tensors = dict[str, Tensor]

_OUT_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)  # bmm(..., out_dtype=)
_POINTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity, nn.Dropout)
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
_KEEP_SIGN = (*_POOLS, nn.Flatten, nn.Identity, nn.Dropout, Maxout, LWTA)  # what is not negative stays so


@dataclass
class Measure:
    """Σ_m |∂_m|^power in place of Σ_m ∂_m. `rows` (F, B) are the samples' weights; they may be set until the backward pass runs."""

    power: int
    rows: Tensor | None = None

    def weighted(self, g: Tensor) -> Tensor:
        """g (F, B, …) such that |g_m|^power carries the weight of sample m."""
        if self.rows is None:
            return g
        rows = self.rows if self.power == 1 else self.rows.sqrt()
        return g * rows.view(*rows.shape, *[1] * (g.dim() - 2)).to(g.dtype)


@dataclass(frozen=True)
class Inhibition:
    """R = 1/M Σ_m hᵀSh of every member as its gradient 2Sh/M: S (F, N, N) is `pairs`; or, for wide layers, AAᵀ − diag d with A `factors`
    (F, N, r) and d `diagonal` (F, N). The factor 2, λ and the learning rate are in them."""

    pairs: Tensor | None = None
    factors: Tensor | None = None
    diagonal: Tensor | None = None

    def add_to(self, g: Tensor, h: Tensor) -> Tensor:
        """g + 2Sh/M for g, h (F, M, N)."""
        share = 1 / h.shape[1]
        if self.pairs is not None:
            return torch.baddbmm(g, h, self.pairs.to(h.dtype), alpha=share)
        assert self.factors is not None
        assert self.diagonal is not None
        fast = kernels(h)
        if fast is not None:
            made: Tensor = fast.inhibit(g.contiguous(), h.contiguous(), self.factors, self.diagonal, share)
            return made
        g = torch.baddbmm(g, torch.bmm(h, self.factors), self.factors.mT, alpha=share)
        return g.addcmul_(h, self.diagonal.unsqueeze(1), value=-share)


@dataclass(frozen=True)
class Asked:
    """What a forward pass is to do besides: keep the outputs of `layers` in `outputs`, inhibit them, measure importances."""

    layers: Collection[str] = ()
    outputs: Tensors = field(default_factory=dict)
    inhibit: Mapping[str, Inhibition] = field(default_factory=dict)
    measure: Measure | None = None  # for parameters; None: their ordinary gradient
    weights: Measure | None = None  # whose rows are the samples' weights at the probes
    probes: Mapping[str, Tensor] = field(default_factory=dict)  # layer → zeros (F, N), at the activation's input
    resized: Collection[str] = ()  # layers that change the number of neurons (Maxout): α belongs to their output
    positive: bool = False  # no input is below zero
    gates: Mapping[str, Tensor] = field(default_factory=dict)  # layer → what its outputs are multiplied by, (F, N)


def native(module: nn.Module) -> bool:
    """Whether every layer of the module is one that `forward` knows."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return False
    if len(list(module.named_parameters(remove_duplicate=False))) != len(list(module.named_parameters())):
        return False  # tied weights stand under one name only
    known = (nn.Linear, nn.Conv2d, *_POINTWISE, *_POOLS, nn.Flatten, Maxout, LWTA)
    layers = [layer for _, layer in in_order(module)]
    return all(type(layer) in known and _plain(layer) for layer in layers) and len(set(layers)) == len(layers)


def in_order(module: nn.Module, before: str = "") -> list[tuple[str, nn.Module]]:
    """The layers of a sequence with their full names, those of sequences within it (AlexNet's) in their place."""
    found = []
    for name, layer in module.named_children():
        found += in_order(layer, f"{before}{name}.") if type(layer) is nn.Sequential else [(before + name, layer)]
    return found


def _plain(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Flatten):
        return layer.start_dim == 1 and layer.end_dim == -1
    if isinstance(layer, nn.Conv2d):
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return set(layer._parameters) <= {"weight", "bias"} and not getattr(layer, "inplace", False)


def forward(module: nn.Module, params: Tensors, x: Tensor, asked: Asked) -> Tensor:
    """x (F, B, …) through the layers.

    A ReLU is computed by the layer before it where that can. After a convolution in Triton its backward mask is then `owed`: the next
    convolution or pool applies it where it writes its own gradient, and anything else is given relu(x), which is x and masks the gradient.
    """
    layers, owed, skip, positive = in_order(module), False, "", asked.positive
    for (name, layer), following in zip(layers, [*layers[1:], ("", None)], strict=True):
        if name in asked.probes and name not in asked.resized and name != skip:
            x, owed = _apply(_Probe, _settled(x, owed), asked.probes[name], asked.weights), False
        fused = isinstance(following[1], nn.ReLU) and following[0] not in asked.probes
        if isinstance(layer, nn.Linear | nn.Conv2d):
            weight, bias = params[f"{name}.weight"], params.get(f"{name}.bias")
            if isinstance(layer, nn.Linear):
                x = _apply(_Linear, _settled(x, owed), weight, bias, fused, asked.measure, positive)
                owed, skip = False, following[0] if fused else ""
            elif _in_triton(layer, x):
                x = _apply(_Conv, x, weight, bias, layer.padding[0], fused, owed, asked.measure)
                owed, skip = fused, following[0] if fused else ""
            else:
                x, owed = _apply(_EachConv, _settled(x, owed), weight, bias, layer, asked.measure), False
        elif name == skip:
            skip = ""
        elif _small_pool(layer, x):
            x, owed = _apply(_Pool, x, owed), False
        else:
            x, owed = _other(layer, _settled(x, owed)), False
        if not isinstance(layer, _KEEP_SIGN):
            positive = fused if isinstance(layer, nn.Linear | nn.Conv2d) and skip else isinstance(layer, nn.ReLU | nn.Sigmoid | nn.Softplus)
        if name in asked.gates:
            x, owed = gated(_settled(x, owed), asked.gates[name]), False
        if name in asked.layers:
            x, owed = _settled(x, owed), False
            if name in asked.probes and name in asked.resized:
                x = _apply(_Probe, x, asked.probes[name], asked.weights)
            asked.outputs[name] = x
            if name in asked.inhibit:
                x = inhibited(x, asked.inhibit[name])
    return _settled(x, owed)


def gated(h: Tensor, gate: Tensor) -> Tensor:
    """h (F, B, N) or (F, B, C, H, W) times the gates (F, N) of its neurons."""
    return h * gate.to(h.dtype).view(len(gate), 1, -1, *[1] * (h.dim() - 3))


def inhibited(h: Tensor, inhibition: Inhibition) -> Tensor:
    """h, whose gradient gains that of the penalty."""
    return _apply(_Inhibit, h, inhibition)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


def _settled(x: Tensor, owed: bool) -> Tensor:
    return x.relu() if owed else x


def _other(layer: nn.Module, x: Tensor) -> Tensor:
    if isinstance(layer, nn.Flatten):
        return x.flatten(2)
    if isinstance(layer, _POOLS) or (isinstance(layer, Maxout | LWTA) and x.dim() > 3):
        pooled: Tensor = layer.forward(x.flatten(0, 1))
        return pooled.view(*x.shape[:2], *pooled.shape[1:])
    result: Tensor = layer.forward(x)
    return result


# ---------------------------------------------------------------------------------------------------------------------- layers
class _Linear(torch.autograd.Function):
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
            dw, db = _linear_sizes(rows, measure.weighted(g.view(*ctx.shape[:-1], -1)), ctx.shape, measure.power, ctx.positive)
        elif wants_w:
            dw = _bmm_wide(g.mT, rows)
        if measure is None and wants_b and db is None:
            db = g.sum(1, dtype=torch.float32)
        return dx, dw if wants_w else None, db if wants_b else None, None, None, None


def _linear_sizes(rows: Tensor, g: Tensor, shape: torch.Size, power: int, positive: bool) -> tuple[Tensor, Tensor]:
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
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda and _OUT_DTYPE else torch.bmm(a, b).float()


class _Conv(torch.autograd.Function):
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
        taps = _laid_out(weight.permute(0, 3, 4, 1, 2), x.dtype)
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
            taps = _laid_out(weight.permute(0, 3, 4, 2, 1), x.dtype)
            dx = fast.conv(g, taps, None, 2 - ctx.padding, mask=x if ctx.owed else None, flip=True)
        if wants_w or wants_b:
            given = g if measure is None else measure.weighted(g)
            dw, db = fast.weight_sums(x, given, ctx.padding, 0 if measure is None else measure.power)
        return dx, dw if wants_w else None, db if wants_b else None, None, None, None, None


def _laid_out(taps: Tensor, dtype: torch.dtype) -> Tensor:
    """(F, 3, 3, O, C), permuted and perhaps of another type → (F, 9, O, C), in one copy."""
    made = torch.empty(taps.shape, dtype=dtype, device=taps.device).copy_(taps)
    return made.flatten(1, 2)


class _EachConv(torch.autograd.Function):
    """Any other convolution, member by member; on a GPU channels last, which the weights decide for all that follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Conv2d, measure: Measure | None) -> Tensor:
        low, shift = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        if x.is_cuda:
            low = low.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
        ctx.save_for_backward(x, low)
        ctx.layer, ctx.measure = layer, measure
        each = [layer._conv_forward(xs, w, None if shift is None else shift[f]) for f, (xs, w) in enumerate(zip(x, low, strict=True))]
        return _restacked(each)

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
        dx = _restacked([each[0] for each in found]) if wants_x else None
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


def _restacked(each: list[Tensor]) -> Tensor:
    """One tensor of all members, in the layout that their convolutions chose."""
    return torch.cat(each).view(len(each), *each[0].shape)


class _Pool(torch.autograd.Function):
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


class _Inhibit(torch.autograd.Function):
    """h as it is; on the way back the penalty's gradient joins in. Positions of a feature map count as samples; a map stays in its own
    precision where it can, since it is its bytes that cost."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, inhibition: Inhibition) -> Tensor:
        ctx.save_for_backward(h)
        ctx.inhibition = inhibition
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (h,) = ctx.saved_tensors
        axis = 2 if h.dim() > 4 else -1
        dtype = g.dtype if h.dim() > 4 and ctx.inhibition.pairs is not None else torch.float32
        flat, shape = h.movedim(axis, -1).flatten(1, -2).to(dtype), g.movedim(axis, -1).shape
        total = ctx.inhibition.add_to(g.movedim(axis, -1).reshape(flat.shape).to(dtype), flat)
        return total.view(shape).movedim(-1, axis).to(g.dtype), None


class _Probe(torch.autograd.Function):
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


# --------------------------------------------------------------------------------------------------------------- what is there
def kernels(x: Tensor) -> ModuleType | None:
    """`selfless.engine.kernels`, for tensors on a GPU where Triton is installed."""
    return _triton() if x.is_cuda else None


@cache
def memory_of(device: torch.device) -> int:
    """The bytes that a GPU has, in use or not: what is sized by it is the same in every run there."""
    return int(torch.cuda.get_device_properties(device).total_memory)


@cache
def _triton() -> ModuleType | None:
    if find_spec("triton") is None or torch.version.hip or torch.cuda.get_device_capability() < (8, 0):
        return None  # older matrix units know neither TF32 nor bfloat16
    from selfless.engine import kernels as found

    return found


def _in_triton(layer: nn.Conv2d, x: Tensor) -> bool:
    fast = kernels(x)
    if fast is None or (layer.stride, layer.dilation, layer.groups, layer.kernel_size) != ((1, 1), (1, 1), 1, (3, 3)):
        return False
    return layer.padding in ((0, 0), (1, 1), (2, 2)) and max(layer.in_channels, layer.out_channels) <= int(fast.CHANNELS)


def _small_pool(layer: nn.Module, x: Tensor) -> bool:
    """2×2 maxima of feature maps that lie channels last."""
    if kernels(x) is None or type(layer) is not nn.MaxPool2d or x.dim() != 5 or not x.permute(0, 1, 3, 4, 2).is_contiguous():
        return False
    size = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode)
    return size == (2, 2, 0, 1, False)
