"""The forward pass over stacked parameters.

A linear layer is one batched matmul, pointwise layers see the stack as it is, pooling sees members as more samples. A convolution runs
member by member, or on a GPU (3×3, at most 64 channels) for all members in one kernel of `selfless.engine.kernels`: docs/lab-notes.md
compares the ways. Two things are added on the way back:

    inhibition   a penalty hᵀSh/M has the gradient 2Sh/M, so a layer with S adds one matmul to the gradient that passes it: `PairGradient`
    importance   with a `Measure` the "gradient" of a parameter is Σ_m |∂L_m/∂θ|ᵖ, and that of a probe (F, N) is Σ_m |∂L_m/∂n|: one pass
                 of `torch.autograd.grad` gives Ω and α of every member
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from selfless.activations import LWTA, Maxout

if TYPE_CHECKING:
    pass

from selfless.engine.native.functions import Inhibit, MemberConv, Probe, StackedLinear, TritonConv, TritonPool, apply
from selfless.engine.native.hardware import is_small_pool, runs_in_triton
from selfless.engine.native.options import ForwardOptions, PairGradient, Tensors

_POINTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity, nn.Dropout)


_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)


_KEEP_SIGN = (*_POOLS, nn.Flatten, nn.Identity, nn.Dropout, Maxout, LWTA)  # what is not negative stays so


def is_native(module: nn.Module) -> bool:
    """True if every layer of the module is one that `forward` knows."""
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


def forward(module: nn.Module, params: Tensors, x: Tensor, options: ForwardOptions) -> Tensor:
    """x (F, B, …) through the layers.

    A ReLU is computed by the layer before it where that can. After a convolution in Triton its backward mask is then `owed`: the next
    convolution or pool applies it where it writes its own gradient, and anything else is given relu(x), which is x and masks the gradient.
    """
    layers, owed, skip, positive = in_order(module), False, "", options.positive
    for (name, layer), following in zip(layers, [*layers[1:], ("", None)], strict=True):
        if name in options.probes and name not in options.resized and name != skip:
            x, owed = apply(Probe, _rectify(x, owed), options.probes[name], options.weights), False
        fused = isinstance(following[1], nn.ReLU) and following[0] not in options.probes
        if isinstance(layer, nn.Linear | nn.Conv2d):
            weight, bias = params[f"{name}.weight"], params.get(f"{name}.bias")
            if isinstance(layer, nn.Linear):
                x = apply(StackedLinear, _rectify(x, owed), weight, bias, fused, options.measure, positive)
                owed, skip = False, following[0] if fused else ""
            elif runs_in_triton(layer, x):
                x = apply(TritonConv, x, weight, bias, layer.padding[0], fused, owed, options.measure)
                owed, skip = fused, following[0] if fused else ""
            else:
                x, owed = apply(MemberConv, _rectify(x, owed), weight, bias, layer, options.measure), False
        elif name == skip:
            skip = ""
        elif is_small_pool(layer, x):
            x, owed = apply(TritonPool, x, owed), False
        else:
            x, owed = _other(layer, _rectify(x, owed)), False
        if not isinstance(layer, _KEEP_SIGN):
            positive = fused if isinstance(layer, nn.Linear | nn.Conv2d) and skip else isinstance(layer, nn.ReLU | nn.Sigmoid | nn.Softplus)
        if name in options.gates:
            x, owed = gated(_rectify(x, owed), options.gates[name]), False
        if name in options.layers:
            x, owed = _rectify(x, owed), False
            if name in options.probes and name in options.resized:
                x = apply(Probe, x, options.probes[name], options.weights)
            options.outputs[name] = x
            if name in options.inhibit:
                x = inhibited(x, options.inhibit[name])
    return _rectify(x, owed)


def gated(h: Tensor, gate: Tensor) -> Tensor:
    """h (F, B, N) or (F, B, C, H, W) times the gates (F, N) of its neurons."""
    return h * gate.to(h.dtype).view(len(gate), 1, -1, *[1] * (h.dim() - 3))


def inhibited(h: Tensor, penalties: Sequence[PairGradient]) -> Tensor:
    """h, whose gradient gains that of the penalties."""
    for penalty in penalties:
        h = apply(Inhibit, h, penalty)
    return h


def _rectify(x: Tensor, owed: bool) -> Tensor:
    return x.relu() if owed else x


def _other(layer: nn.Module, x: Tensor) -> Tensor:
    if isinstance(layer, nn.Flatten):
        return x.flatten(2)
    if isinstance(layer, _POOLS) or (isinstance(layer, Maxout | LWTA) and x.dim() > 3):
        pooled: Tensor = layer.forward(x.flatten(0, 1))
        return pooled.view(*x.shape[:2], *pooled.shape[1:])
    result: Tensor = layer.forward(x)
    return result
