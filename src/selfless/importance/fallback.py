"""Per-sample gradients of parameters without a closed form: by `vmap(grad)`, or by a loop over samples where vmap fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from selfless.functional.shapes import wide
from selfless.importance.closed import sum_powers
from selfless.importance.objectives import Objective
from selfless.network.calling import CalledModel

ROUNDING = {
    torch.float64: 1e-6,  # some layers, such as the norms of Llama, compute in float32 inside
    torch.float32: 1e-3,
    torch.bfloat16: 0.1,
    torch.float16: 0.05,
}  # relative error of two equal gradients
Chunks = Callable[[list[str]], Iterable[dict[str, Tensor]]]  # names → chunks {name: (m, *shape)} of per-sample gradients


@dataclass
class Fallback:
    """Computes Σ_m w_m |∂L_m/∂θ|ᵖ for some parameters of one model, and remembers if vmap works for this model."""

    model: nn.Module
    failed: bool = False  # True once vmap could not run this model

    def reduce(
        self, names: list[str], values: Tensor, power: int, rows: Tensor | None, chunks: Chunks | None, retain: bool
    ) -> dict[str, Tensor]:
        """Sum over samples with vmap, or with one backward pass per sample, which is equally exact but slow."""
        parameters = [self.model.get_parameter(n) for n in names]
        if chunks is not None and not self.failed:
            try:
                return self._sum_and_check(names, parameters, values, chunks(names), power, rows)
            except (RuntimeError, LookupError, ValueError, TypeError, AssertionError) as error:  # vmap's rules assert shapes
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                is_warned = bool(torch.isfinite(values).all())  # NaN in the data is another fault, which is told later
                message = (
                    f"the importance of {', '.join(names[:3])}{'…' if len(names) > 3 else ''} is computed sample by sample, which is exact "
                    f"but slow: they have no closed form, and vmap cannot run this model ({reason}). If it takes too long, use "
                    "estimator='per-batch' and choose the strength anew, or freeze them with requires_grad_(False)."
                )
                if is_warned:
                    warnings.warn(message, stacklevel=2)
        self.failed = True

        def sample_gradient(m: int) -> dict[str, Tensor]:
            is_last_use = m == len(values) - 1 and not retain
            grads = torch.autograd.grad(values[m], parameters, retain_graph=not is_last_use, allow_unused=True)
            found = zip(names, parameters, grads, strict=True)
            return {n: (torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g)[None] for n, p, g in found}

        return _sum_chunks((sample_gradient(m) for m in range(len(values))), power, rows)[0]

    def _sum_and_check(
        self, names: list[str], parameters: list[Any], values: Tensor, chunks: Iterable[dict[str, Tensor]], power: int, rows: Tensor | None
    ) -> dict[str, Tensor]:
        """Sum the per-sample gradients of vmap. Check that they add up to the batch gradient.

        This is done for each batch, as another batch may have a tensor with as many rows as samples, or samples that depend on each other.
        """
        total, gradient_sum = _sum_chunks(chunks, power, rows)
        grads = torch.autograd.grad(values.sum(), parameters, retain_graph=True, allow_unused=True)
        for name, g in zip(names, grads, strict=True):
            g = torch.zeros_like(gradient_sum[name]) if g is None else wide(g.to_dense() if g.is_sparse else g)
            if bool(torch.isfinite(g).all()) and not is_same(gradient_sum[name], g, values, self.model.get_parameter(name)):
                raise ValueError("the first axis of its batches is not the axis of samples")
        return total


def is_same(found: Tensor, gradient: Tensor, values: Tensor, parameter: Tensor) -> bool:
    """Return True if Σ_m g_m is the gradient of the batch, up to rounding.

    A gradient may be nothing but rounding errors, as that of a bias before an instance norm. Then that of 3 Σ L_m is not three times as
    large, but another one of about the same relative size.
    """
    gap, size = (found - gradient).abs().max(), gradient.abs().max()
    if bool(gap <= 30 * ROUNDING[gradient.dtype] * size.clamp(min=1e-12)):
        return True
    (again,) = torch.autograd.grad(3 * values.sum(), [parameter], retain_graph=True, allow_unused=True)
    if again is None or again.is_sparse:
        return False
    noise = (wide(again) / 3 - gradient).abs().max()
    return bool(noise > 0.1 * size) and bool(gap <= 30 * torch.maximum(noise, size))


def vmap_chunks(wrapper: CalledModel, batch: Any, target: Any, objective: Objective, count: int, memory: int) -> Chunks:
    """Return a function that yields the per-sample gradients of the named parameters in chunks of samples."""
    model = wrapper.model

    def chunks(names: list[str]) -> Iterator[dict[str, Tensor]]:
        places = _parameter_places(wrapper, {model.get_parameter(n): n for n in names})

        def call(parameters: dict[str, Tensor], sample: Any, label: Any) -> Tensor:
            replaced = {place: parameters[name] for place, name in places.items()}
            values = objective.value(torch.func.functional_call(wrapper, replaced, (sample,), tie_weights=False), label)
            if values.numel() != 1:
                raise ValueError("one sample gave several outputs: the first axis of its batches is not the axis of samples")
            return values.sum()

        yield from _vmap(call, {n: model.get_parameter(n).detach() for n in names}, batch, target, count, memory)

    return chunks


def _parameter_places(model: nn.Module, names: dict[Tensor, str]) -> dict[str, str]:
    """Return {path in the module tree: name} for every path under which a module holds one of these parameters."""
    found = {}
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter in names:
                found[f"{prefix}.{key}" if prefix else key] = names[parameter]
    return found


def _vmap(
    call: Callable[[dict[str, Tensor], Any, Any], Tensor],
    parameters: dict[str, Tensor],
    batch: Any,
    target: Any,
    count: int,
    memory: int,
) -> Iterator[dict[str, Tensor]]:
    """Yield chunks of per-sample gradients of `call(parameters, batch of one, target of one) -> scalar`, by vmap(grad)."""
    size = sum(p.numel() * p.element_size() for p in parameters.values())
    step = max(1, memory // max(1, size))
    axes = tree_map(lambda leaf: 0 if _per_sample(leaf, count) else None, (batch, target))

    def single(parameters: dict[str, Tensor], both: Any) -> Tensor:
        batch, target = tree_map(lambda leaf, axis: leaf.unsqueeze(0) if axis == 0 else leaf, both, axes)
        return call(parameters, batch, target)

    gradient = torch.func.vmap(torch.func.grad(single), in_dims=(None, axes))
    for start in range(0, count, step):
        chunk = tree_map(lambda leaf, s=start: leaf[s : s + step] if _per_sample(leaf, count) else leaf, (batch, target))
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():  # fused attention has no batching rule; plain matmuls do
            warnings.filterwarnings("ignore", "There is a performance drop")  # an LSTM has none either, and is looped over
            found = gradient(parameters, chunk)
        yield found


def _per_sample(leaf: Any, count: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == count


def _sum_chunks(chunks: Iterable[dict[str, Tensor]], power: int, rows: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return (Σ_m w_m |g_m|ᵖ, Σ_m g_m) over chunks of per-sample gradients; `rows` are the factors of g_m that give w_m."""
    total: dict[str, Tensor] = {}
    gradient_sum: dict[str, Tensor] = {}
    start = 0
    for chunk in chunks:
        count = len(next(iter(chunk.values())))
        part = None if rows is None else rows[start : start + count]
        for name, g in chunk.items():
            value = sum_powers(weight_rows(wide(g), part), power)
            total[name] = total[name] + value if name in total else value
            gradient_sum[name] = gradient_sum[name] + wide(g).sum(0) if name in gradient_sum else wide(g).sum(0)
        start += count
    return total, gradient_sum


def weight_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return x (M, …) with row m multiplied by rows[m]; x itself if `rows` is None."""
    return x if rows is None else x * rows.to(x.dtype).view(-1, *[1] * (x.dim() - 1))
