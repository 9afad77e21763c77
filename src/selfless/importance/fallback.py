"""Per-sample gradients for parameters without a closed form: by `vmap(grad)`, and by a loop over samples where vmap fails."""

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
from selfless.importance.closed import reduced
from selfless.importance.objectives import Objective
from selfless.network.calling import CalledModel, Forward

ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}  # of two ways to the same gradient
Chunks = Callable[[list[str]], Iterable[dict[str, Tensor]]]  # names → chunks {name: (m, *shape)} of per-sample gradients


@dataclass
class Fallback:
    """Σ_m w_m |∂L_m/∂θ|ᵖ of some parameters of one model. Remembers whether vmap works for this model."""

    model: nn.Module
    proven: bool = False  # vmap's gradients were seen to add up to the batch's gradient
    failed: bool = False  # vmap cannot run this model

    def reduce(
        self, names: list[str], values: Tensor, power: int, rows: Tensor | None, chunks: Chunks | None, retain: bool
    ) -> dict[str, Tensor]:
        """Sum over samples: by vmap, or with one backward pass for each sample, which is slow and as exact."""
        parameters = [self.model.get_parameter(n) for n in names]
        if chunks is not None and not self.failed:
            try:
                return self._checked(names, parameters, values, chunks(names), power, rows)
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                warnings.warn(
                    f"importance of {', '.join(names[:3])}{'…' if len(names) > 3 else ''} is taken sample by sample, exact but "
                    f"slow: vmap cannot run this model ({reason}).",
                    stacklevel=2,
                )
        self.failed = True

        def one(m: int) -> dict[str, Tensor]:
            last = m == len(values) - 1 and not retain
            grads = torch.autograd.grad(values[m], parameters, retain_graph=not last, allow_unused=True)
            found = zip(names, parameters, grads, strict=True)
            return {n: (torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g)[None] for n, p, g in found}

        return _sum_chunks((one(m) for m in range(len(values))), power, rows)[0]

    def _checked(
        self, names: list[str], parameters: list[Any], values: Tensor, chunks: Iterable[dict[str, Tensor]], power: int, rows: Tensor | None
    ) -> dict[str, Tensor]:
        """Sum the vmapped gradients; the first time, check that they add up to the batch's gradient."""
        total, plain = _sum_chunks(chunks, power, rows)
        if not self.proven:
            grads = torch.autograd.grad(values.sum(), parameters, retain_graph=True, allow_unused=True)
            for name, g in zip(names, grads, strict=True):
                g = torch.zeros_like(plain[name]) if g is None else wide(g.to_dense() if g.is_sparse else g)
                if bool(torch.isfinite(g).all()) and not bool(
                    (plain[name] - g).abs().max() <= 30 * ROUNDING[g.dtype] * g.abs().max().clamp(min=1e-12)
                ):
                    raise ValueError("its batches do not split into samples along their first axis")
            self.proven = True
        return total


def vmap_chunks(
    model: nn.Module, batch: Any, target: Tensor | None, objective: Objective, forward: Forward | None, count: int, memory: int
) -> Chunks:
    """Return a function that yields per-sample gradients of the named parameters, a chunk of samples at a time."""
    wrapper = CalledModel(model, forward)

    def chunks(names: list[str]) -> Iterator[dict[str, Tensor]]:
        slots = _slots(wrapper, {model.get_parameter(n): n for n in names})

        def call(parameters: dict[str, Tensor], sample: Any, wanted: Tensor | None) -> Tensor:
            replaced = {slot: parameters[name] for slot, name in slots.items()}
            values = objective.value(torch.func.functional_call(wrapper, replaced, (sample,), tie_weights=False), wanted)
            if values.numel() != 1:
                raise ValueError("one sample gave several outputs: its batches do not split along their first axis")
            return values.sum()

        yield from _vmap(call, {n: model.get_parameter(n).detach() for n in names}, batch, target, count, memory)

    return chunks


def _slots(model: nn.Module, wanted: dict[Tensor, str]) -> dict[str, str]:
    """Return {place: name} for every place a parameter stands in; a module registered twice counts once."""
    found = {}
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter in wanted:
                found[f"{prefix}.{key}" if prefix else key] = wanted[parameter]
    return found


def _vmap(
    call: Callable[[dict[str, Tensor], Any, Any], Tensor],
    parameters: dict[str, Tensor],
    batch: Any,
    target: Any,
    count: int,
    memory: int,
) -> Iterator[dict[str, Tensor]]:
    """Chunks of per-sample gradients of `call(parameters, batch of one, target of one) -> scalar`, by vmap(grad)."""
    size = sum(p.numel() * p.element_size() for p in parameters.values())
    step = max(1, memory // max(1, size))
    mapped = tree_map(lambda leaf: 0 if _per_sample(leaf, count) else None, (batch, target))

    def single(parameters: dict[str, Tensor], both: Any) -> Tensor:
        batch, target = tree_map(lambda leaf, axis: leaf.unsqueeze(0) if axis == 0 else leaf, both, mapped)
        return call(parameters, batch, target)

    gradient = torch.func.vmap(torch.func.grad(single), in_dims=(None, mapped))
    for start in range(0, count, step):
        chunk = tree_map(lambda leaf, s=start: leaf[s : s + step] if _per_sample(leaf, count) else leaf, (batch, target))
        with sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels have no batching rule; plain matmuls do
            found = gradient(parameters, chunk)
        yield found


def _per_sample(leaf: Any, count: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == count


def _sum_chunks(chunks: Iterable[dict[str, Tensor]], power: int, rows: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(Σ_m w_m |g_m|ᵖ, Σ_m g_m) over chunks of per-sample gradients."""
    total: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    start = 0
    for chunk in chunks:
        count = len(next(iter(chunk.values())))
        part = None if rows is None else rows[start : start + count]
        for name, g in chunk.items():
            value = reduced(weight_rows(wide(g), part), power)
            total[name] = total[name] + value if name in total else value
            plain[name] = plain[name] + wide(g).sum(0) if name in plain else wide(g).sum(0)
        start += count
    return total, plain


def weight_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """x (M, …) with row m times rows[m]; None leaves it as it is."""
    return x if rows is None else x * rows.to(x.dtype).view(-1, *[1] * (x.dim() - 1))
