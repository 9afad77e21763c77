"""The forward pass over stacked parameters.

A linear layer is one batched matmul. Pointwise layers run on the stacked tensor. Pooling treats members as more samples. Batch norm and
convolutions run member by member; on a GPU a 3×3 convolution with at most 64 channels runs for all members in one kernel of
`selfless.engine.kernels` (docs/lab-notes.md compares the two). The backward pass can do two more things:

    inhibition   a penalty hᵀSh/M has the gradient 2Sh/M, which a layer adds to the gradient that passes through it (`PairGradient`)
    importance   with a `Measure` the "gradient" of a parameter is Σ_m |∂L_m/∂θ|ᵖ, and that of a probe (F, N) is Σ_m |∂L_m/∂n|, so one
                 call of `torch.autograd.grad` gives Ω and α of every member
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from selfless.activations import LWTA, Maxout
from selfless.engine.native.functions import Inhibit, MemberConv, Probe, StackedLinear, TritonConv, TritonPool, apply
from selfless.engine.native.hardware import is_small_pool, kernels, runs_in_triton
from selfless.engine.native.norms import NORMS, batch_norm, is_plain_norm
from selfless.engine.native.options import ForwardOptions, Penalty, Tensors

_POINTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity, nn.Dropout)
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
_KEEP_SIGN = (*_POOLS, nn.Flatten, nn.Identity, nn.Dropout, Maxout, LWTA)  # outputs are ≥ 0 if inputs are


def is_native(module: nn.Module) -> bool:
    """Return True if `forward` supports every layer of the module."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return False
    if len(list(module.named_parameters(remove_duplicate=False))) != len(list(module.named_parameters())):
        return False  # tied weights: `params` has only one of their names
    known = (nn.Linear, nn.Conv2d, *NORMS, *_POINTWISE, *_POOLS, nn.Flatten, Maxout, LWTA)
    layers = [layer for _, layer in in_order(module)]
    plain = all(type(layer) in known and _is_plain(layer) for layer in layers) and len(set(layers)) == len(layers)
    return plain and not any(_is_hooked(part) for part in module.modules())


def in_order(module: nn.Module, before: str = "") -> list[tuple[str, nn.Module]]:
    """Return the layers of a sequence with their full names; nested sequences (as in AlexNet) are flattened."""
    found = []
    for name, layer in module.named_children():
        found += in_order(layer, f"{before}{name}.") if type(layer) is nn.Sequential else [(before + name, layer)]
    return found


def _is_plain(layer: nn.Module) -> bool:
    """Return True if the options of a layer are supported."""
    if isinstance(layer, nn.Flatten):
        return layer.start_dim == 1 and layer.end_dim == -1
    if isinstance(layer, nn.Conv2d):
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if isinstance(layer, NORMS) and not is_plain_norm(layer):
        return False
    return set(layer._parameters) <= {"weight", "bias"} and not getattr(layer, "inplace", False)


def _is_hooked(layer: nn.Module) -> bool:
    """Return True if the user has registered a hook, which only the module itself would call."""
    return any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks))


def forward(module: nn.Module, params: Tensors, x: Tensor, options: ForwardOptions) -> Tensor:
    """Return the output of the layers for x (F, B, …).

    Where possible, a ReLU is fused into the layer before it. A Triton convolution with a fused ReLU does not mask its gradient in the
    backward pass: the mask is `owed`. The next Triton convolution, pool or penalty applies the mask when it writes its own gradient.
    Before any other layer `_rectify` calls relu(x), which leaves the values unchanged and masks the gradient.
    """
    layers, owed, skip, positive = in_order(module), False, "", options.positive
    pending: Penalty | None = None  # a penalty whose gradient the next layer adds
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
                trains = torch.is_grad_enabled()
                x = apply(TritonConv, x, weight, bias, layer.padding[0], fused, owed, options.measure, pending, trains)
                pending = None
                owed, skip = fused, following[0] if fused else ""
            else:
                joined = fused and kernels(x) is not None
                x = apply(MemberConv, x, weight, bias, layer, options.measure, joined, owed)
                owed, skip = joined, following[0] if joined else ""
        elif name == skip:
            skip = ""
        elif is_small_pool(layer, x):
            x, owed = apply(TritonPool, x, owed), False
        elif isinstance(layer, NORMS):
            x, owed = batch_norm(layer, name, params, options.buffers, _rectify(x, owed)), False
        elif isinstance(layer, nn.Dropout) and layer.training and options.draws is not None:
            x, owed = options.draws.by_member(layer, _rectify(x, owed)), False
        else:
            x, owed = _other(layer, _rectify(x, owed)), False
        if not isinstance(layer, _KEEP_SIGN):
            positive = fused if isinstance(layer, nn.Linear | nn.Conv2d) and skip else isinstance(layer, nn.ReLU | nn.Sigmoid | nn.Softplus)
        if name in options.gates:
            x, owed = apply_gates(_rectify(x, owed), options.gates[name]), False
        if name in options.layers:
            if options.differentiable is None or name in options.differentiable:
                x, owed = _rectify(x, owed), False
            if name in options.probes and name in options.resized:
                x = apply(Probe, x, options.probes[name], options.weights)
            options.outputs[name] = x
            if name in options.inhibit:
                pending = _only_product(options.inhibit[name], following[1], x)
                x, owed = (x, owed) if pending is not None else (inhibited(x, options.inhibit[name], owed), False)
    return _rectify(x, owed)


def apply_gates(h: Tensor, gate: Tensor) -> Tensor:
    """Return h (F, B, N) or (F, B, C, H, W) times the gates (F, N) of its neurons."""
    return h * gate.to(h.dtype).view(len(gate), 1, -1, *[1] * (h.dim() - 3))


def inhibited(h: Tensor, penalties: Sequence[Penalty], owed: bool = False) -> Tensor:
    """Return h unchanged; in the backward pass the gradients of the penalties are added to its gradient, and the mask if it is owed."""
    for k, penalty in enumerate(penalties):
        h = apply(Inhibit, h, penalty, owed and k == 0)  # the first one is the last of the backward pass
    return h


def _only_product(penalties: Sequence[Penalty], following: nn.Module | None, x: Tensor) -> Penalty | None:
    """Return the only penalty if the layer that follows is a convolution in Triton, which adds its gradient when it writes its own."""
    follows = isinstance(following, nn.Conv2d) and x.dim() > 4 and runs_in_triton(following, x)
    return penalties[0] if follows and len(penalties) == 1 and penalties[0].any_precision else None


def _rectify(x: Tensor, owed: bool) -> Tensor:
    """Return x, with the ReLU mask in its backward pass if that is still owed and there is one."""
    return x.relu() if owed and torch.is_grad_enabled() else x


def _other(layer: nn.Module, x: Tensor) -> Tensor:
    """Run a layer without parameters."""
    if isinstance(layer, nn.Flatten):
        return x.flatten(2)
    if isinstance(layer, _POOLS) or (isinstance(layer, Maxout | LWTA) and x.dim() > 3):
        pooled: Tensor = layer.forward(x.flatten(0, 1))
        return pooled.view(*x.shape[:2], *pooled.shape[1:])
    result: Tensor = layer.forward(x)
    return result
