"""Closed forms: Σ_m |g_m|ᵖ of one module's parameters, from its input a and the gradient δ at its output.

Row m of δ depends on sample m alone. So a linear layer needs one matrix product, |δ|ᵀ|a|. Convolutions, sequences, embeddings and norms
compute g_m for a few samples at a time, within a memory bound. `selfless.importance.reducer` decides where a closed form is exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfless.functional.shapes import transposed
from selfless.network.roles import is_transposed_linear

CACHE = 8 * 2**20  # bytes of a chunk on a CPU: more would leave the cache, and go back to the system each time it is freed

# Rule: module, input a (M, …), output gradient δ (M, …), power p, memory bound → (parameter name, Σ_m |g_m|ᵖ)
Rule = Callable[[Any, Tensor, Tensor, int, int], Iterator[tuple[str, Tensor]]]


def linear(module: nn.Linear, a: Tensor, delta: Tensor, power: int, memory: int) -> Iterator[tuple[str, Tensor]]:
    """g_m = Σ_t δ_mt a_mtᵀ over positions t.  With one position per sample |g_m| = |δ_m||a_m|ᵀ, so Σ_m |g_m| = |δ|ᵀ|a|: one matmul."""
    a, delta = a.flatten(1, -2) if a.dim() > 2 else a.unsqueeze(1), delta.flatten(1, -2) if delta.dim() > 2 else delta.unsqueeze(1)
    if a.shape[1] == 1:
        yield "weight", power_of(delta[:, 0], power).T @ power_of(a[:, 0], power)
    else:
        size = delta.shape[2] * a.shape[2] * a.element_size()
        yield "weight", sum_in_chunks(lambda s: sum_powers_(delta[s].mT @ a[s], power), len(a), size, chunk_memory(a, memory))
    if module.bias is not None:
        yield "bias", sum_powers(delta.sum(1), power)


def transposed_linear(module: Any, a: Tensor, delta: Tensor, power: int, memory: int) -> Iterator[tuple[str, Tensor]]:
    """The linear layer of GPT-2 (`Conv1D`), whose weight is (in, out): g_m = Σ_t a_mt δ_mtᵀ."""
    for name, value in linear(module, a, delta, power, memory):
        yield name, value.T if name == "weight" else value


def conv(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, a: Tensor, delta: Tensor, power: int, memory: int) -> Iterator[tuple[str, Tensor]]:
    """g_m = Σ_p patch_p(a_m) ⊗ δ_mp over positions p: the unfolded input times δ, by group, for 1, 2 or 3 spatial dimensions."""
    groups, out = module.groups, module.out_channels
    positions, fan_in = delta[0, 0].numel(), module.weight[0].numel()
    size = groups * fan_in * positions + module.weight.numel()  # the unfolded input and g_m

    def part(s: slice) -> Tensor:
        patches = unfold(module, a[s])  # (m, groups·fan_in, positions)
        rows = len(patches) * groups
        g = patches.reshape(rows, fan_in, positions) @ transposed(delta[s].reshape(rows, out // groups, positions))
        return sum_powers_(g.view(len(patches), groups, fan_in, -1), power)

    total = sum_in_chunks(part, len(a), size * a.element_size(), chunk_memory(a, memory))  # (groups, fan_in, out/groups)
    yield "weight", total.mT.reshape(module.weight.shape)
    if module.bias is not None:
        yield "bias", sum_powers(delta.flatten(2).sum(2), power)


def embedding(module: nn.Embedding, a: Tensor, delta: Tensor, power: int, memory: int) -> Iterator[tuple[str, Tensor]]:
    """g_m of row v = Σ_{t: a_mt = v} δ_mt: sum δ within each pair (sample, token), take the power, sum by token.

    The sum is sparse: a batch reads few rows of a large table.
    """
    tokens, rows = a.reshape(len(a), -1), module.num_embeddings  # one token of a sample may come without an axis
    pairs = (torch.arange(len(a), device=a.device)[:, None] * rows + tokens).flatten()
    unique, inverse = pairs.unique(return_inverse=True)
    delta = delta.reshape(-1, module.embedding_dim)
    g = delta.new_zeros(len(unique), module.embedding_dim).index_add_(0, inverse, delta)
    read, value = unique % rows, power_of(g, power)
    if module.padding_idx is not None:
        value = value * (read != module.padding_idx).unsqueeze(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks")  # torch 2.11 warns although the argument is given
        found = torch.sparse_coo_tensor(read.unsqueeze(0), value, (rows, module.embedding_dim), check_invariants=False)
    yield "weight", found


def norm(module: nn.Module, a: Tensor, delta: Tensor, power: int, memory: int) -> Iterator[tuple[str, Tensor]]:
    """g_m = Σ δ·â for the scale and Σ δ for the shift, over the positions of sample m; â is the normalised input."""
    if isinstance(module, nn.LayerNorm):
        shape = module.normalized_shape
        hat, keep = F.layer_norm(a, shape, eps=module.eps), len(shape)
    elif isinstance(module, nn.RMSNorm):
        shape = module.normalized_shape
        hat, keep = F.rms_norm(a, list(shape), eps=module.eps), len(shape)
    elif isinstance(module, nn.GroupNorm):
        hat, keep = F.group_norm(a, module.num_groups, eps=module.eps), 0
    else:
        assert isinstance(module, nn.modules.batchnorm._BatchNorm)
        mean, variance = (None if s is None else s.to(a.dtype) for s in (module.running_mean, module.running_var))
        hat, keep = F.batch_norm(a, mean, variance, eps=module.eps), 0

    def sum_positions(x: Tensor) -> Tensor:  # (M, positions…, features…) or (M, channels, positions…) → (M, features…)
        axes = range(1, x.dim() - keep) if keep else range(2, x.dim())
        return x.sum(tuple(axes)) if len(axes) else x

    for name, parameter in module.named_parameters(recurse=False):
        yield name, sum_powers(sum_positions(delta * hat if name == "weight" else delta), power).view_as(parameter)


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv1d: conv,
    nn.Conv2d: conv,
    nn.Conv3d: conv,
    nn.Embedding: embedding,
    nn.LayerNorm: norm,
    nn.RMSNorm: norm,
    nn.GroupNorm: norm,
    nn.BatchNorm1d: norm,
    nn.BatchNorm2d: norm,
    nn.BatchNorm3d: norm,
}


def rule_for(module: nn.Module) -> Rule | None:
    """Return the closed form of a module, or None. A subclass may compute something else, so only exact types have one."""
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        return None
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
        return None  # batch statistics make samples depend on each other
    return transposed_linear if is_transposed_linear(module) else RULES.get(type(module))


def power_of(g: Tensor, power: int) -> Tensor:
    """|g|ᵖ for p = 1 or 2."""
    return g.abs() if power == 1 else g.square()


def sum_powers(g: Tensor, power: int) -> Tensor:
    """Σ_m |g_m|ᵖ over the leading axis."""
    return power_of(g, power).sum(0)


def sum_powers_(g: Tensor, power: int) -> Tensor:
    """Σ_m |g_m|ᵖ over the leading axis, without a copy: g is overwritten."""
    return (g.abs_() if power == 1 else g.square_()).sum(0)


def sum_in_chunks(part: Callable[[slice], Tensor], count: int, size: int, memory: int) -> Tensor:
    """Σ part(chunk) over chunks of the `count` samples. A sample takes `size` bytes, a chunk at most `memory` bytes."""
    step = max(1, memory // max(1, size))
    total = part(slice(0, step))
    for start in range(step, count, step):
        total += part(slice(start, start + step))
    return total


def chunk_memory(a: Tensor, memory: int) -> int:
    """Return how many bytes a chunk of the samples of a may take: on a CPU no more than the cache holds."""
    return min(memory, CACHE) if a.device.type == "cpu" else memory


def unfold(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, a: Tensor) -> Tensor:
    """Return the patches of the input, (M, channels·kernel size, positions), for any stride, padding, dilation and dimension."""
    spatial = a.dim() - 2
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        pads = [(t // 2, t - t // 2) for t in totals]
    else:
        pads = [(0, 0)] * spatial if module.padding == "valid" else [(int(p), int(p)) for p in module.padding]
    flat = [p for pair in reversed(pads) for p in pair]
    if any(flat):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        a = F.pad(a, flat, mode=mode)
    for axis, (k, s, d) in enumerate(zip(module.kernel_size, module.stride, module.dilation, strict=True), start=2):
        a = a.unfold(axis, d * (k - 1) + 1, s)[..., ::d]  # (M, C, out…, k…)
    a = a.permute(0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial))
    return a.flatten(1, 1 + spatial).flatten(2)
