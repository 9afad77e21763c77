"""Per-sample gradients of parameters that are used outside of a known module, from the operation that uses them.

An operation y = f(θ, a) has the gradient δ at its output. With the axis of samples first, δ is (M, …), and

    y = a θ          g_m = a_mᵀ δ_m                    attention's projections, Conv1D, a head that shares the embedding's weight
    y = a ∘ θ        g_m = Σ δ_m ∘ a_m                 the scale of a norm in any spelling, a layer scale
    y = a + θ        g_m = Σ δ_m                       a bias, learned positions, a class token
    y = θ[tokens]    g_m[v] = Σ_{t: token t = v} δ_mt  embeddings, also of positions that all samples share

where Σ runs over the positions of sample m that share an entry of θ. g_m of a parameter with several uses is the sum over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfless.functional.shapes import wide
from selfless.importance.closed import sum_in_chunks, sum_powers, sum_powers_
from selfless.importance.graph import Use, apply_views, shape_of

Lay = Callable[[Tensor], Tensor]  # (any layout) → (M, …)
NOTHING = "nothing"  # the layout of a use that no sample reaches in this batch


def layouts(shape: torch.Size, count: int) -> dict[str, Lay]:
    """Return the ways in which a tensor of this shape may hold `count` samples; each puts their axis first."""
    found: dict[str, Lay] = {}
    if not shape:
        return found
    if shape[0] == count:
        found["first"] = lambda x: x
    if len(shape) > 1 and shape[1] == count:
        found["second"] = lambda x: x.movedim(1, 0)
    if shape[0] % count == 0:
        found["rows"] = lambda x: x.unflatten(0, (count, -1))  # sample by sample
        found["steps"] = lambda x: x.unflatten(0, (-1, count)).movedim(1, 0)  # position by position
    return found


@dataclass(frozen=True)
class Part:
    """g_m of one use, for a slice of samples, and how many bytes a sample takes."""

    gradient: Callable[[slice], Tensor]
    size: int


def layouts_of(use: Use, shape: torch.Size, count: int) -> dict[str, Lay]:
    """Return the ways in which δ of this use may hold the samples: a product has them in its rows."""
    is_product = use.node.name() in ("AddmmBackward0", "MmBackward0")
    return {name: lay for name, lay in layouts(shape, count).items() if not (is_product and name == "second")}


def is_supported(use: Use) -> bool:
    """Return True if the operation of this use has a formula here."""
    node, slot = use.node, use.slot
    if _shape(use) is None:
        return False
    match node.name():
        case "AddmmBackward0":
            return slot in (0, 2) and node._saved_alpha == 1 and node._saved_beta == 1
        case "MmBackward0":
            return slot == 1
        case "AddBackward0":
            return slot == 0 or node._saved_alpha == 1
        case "MulBackward0" | "ExpandBackward0":
            return True
        case "NativeLayerNormBackward0":
            return slot in (1, 2)
        case "EmbeddingBackward0":
            return not node._saved_scale_grad_by_freq
    return False


def read_saved(use: Use) -> None:
    """Read what `part_of` will need, before a backward pass: within one, checkpointed activations are gone."""
    match use.node.name(), use.slot:
        case "AddmmBackward0", 2:
            use.saved("mat1")
        case "MmBackward0", _:
            use.saved("self")
        case "NativeLayerNormBackward0", 1:
            for name in ("input", "result1", "result2"):
                use.saved(name)
        case "MulBackward0", slot:
            use.saved("self" if slot else "other")
        case "EmbeddingBackward0", _:
            use.saved("indices")


def part_of(use: Use, shape: torch.Size, delta: Tensor, layout: str, count: int, rows: Tensor | None) -> Part | None:
    """Return g_m of a use from δ; None if θ does not have the same value for all samples. `shape` is that of the parameter."""
    shape = _shape(use) or shape
    if layout == NOTHING:
        return Part(lambda s: wide(delta).new_zeros(len(range(count)[s]), *shape), shape.numel() * delta.element_size())
    lay = layouts(delta.shape, count)[layout]
    whole, delta = delta.shape, wide(lay(delta))
    if rows is not None:
        delta = delta * rows.to(delta.dtype).view(-1, *[1] * (delta.dim() - 1))
    name = use.node.name()
    if name in ("AddmmBackward0", "MmBackward0") and use.slot > 0:
        a = wide(lay(use.saved("mat1" if name == "AddmmBackward0" else "self")))
        a, delta = (x.unsqueeze(1) if x.dim() == 2 else x for x in (a, delta))
        return Part(lambda s: a[s].mT @ delta[s], shape.numel() * delta.element_size())
    if name == "EmbeddingBackward0":
        return _embedding_part(use, shape, whole, lay, delta)
    if name == "NativeLayerNormBackward0" and use.slot == 1:
        delta = delta * wide(lay((use.saved("input") - use.saved("result1")) * use.saved("result2")))
    if name == "MulBackward0":
        other = use.saved("other" if use.slot == 0 else "self")
        delta = delta * wide(lay(other.expand(whole)))
    return _broadcast_part(shape, whole, layout, delta)


def _broadcast_part(shape: torch.Size, whole: torch.Size, layout: str, delta: Tensor) -> Part | None:
    """g_m = Σ δ_m over the axes along which θ was broadcast."""
    padded = [1] * (len(whole) - len(shape)) + list(shape)
    axis = 1 if layout == "second" else 0
    if padded[axis] != 1:
        return None
    rest = [n for i, n in enumerate(padded) if i != axis]
    target = [1, *rest] if layout in ("rows", "steps") else rest
    axes = [i + 1 for i, n in enumerate(target) if n == 1 and delta.shape[i + 1] != 1]
    return Part(lambda s: (delta[s].sum(axes) if axes else delta[s]).reshape(-1, *shape), shape.numel() * delta.element_size())


def _embedding_part(use: Use, shape: torch.Size, whole: torch.Size, lay: Lay, delta: Tensor) -> Part:
    """g_m[v] = Σ_{t: token t = v} δ_mt."""
    tokens = lay(use.saved("indices").expand(whole[:-1])).reshape(len(delta), -1)  # (M, T)
    delta = delta.reshape(len(delta), -1, shape[-1])
    padding = use.node._saved_padding_idx

    def gradient(s: slice) -> Tensor:
        g = delta.new_zeros(len(delta[s]), *shape)
        g.scatter_add_(1, tokens[s, :, None].expand_as(delta[s]), delta[s])
        if padding < shape[0]:
            g[:, padding] = 0
        return g

    return Part(gradient, shape.numel() * delta.element_size())


def total(parts: Sequence[tuple[Use, Part]], count: int, power: int, memory: int) -> Tensor:
    """Σ_m |g_m|ᵖ of one parameter, where g_m is the sum over its uses; of the view of it that is used, if that is not a transpose."""
    use, first = parts[0]
    if len(parts) == 1:
        return _transpose(use, sum_in_chunks(lambda s: sum_powers(first.gradient(s), power), count, 2 * first.size, memory))

    def joined(s: slice) -> Tensor:
        pieces = (_transpose(each, part.gradient(s)) for each, part in parts)
        g = (next(pieces) + next(pieces)).contiguous()  # a new tensor: a piece may be δ itself, which the backward pass still reads
        for piece in pieces:
            g += piece
        return sum_powers_(g, power)

    return sum_in_chunks(joined, count, 2 * first.size, memory)


def gradient_sum(parts: Sequence[tuple[Use, Part]], count: int, memory: int) -> Tensor:
    """Σ_m g_m of one parameter, which must be the gradient of the batch."""
    sums = [(use, sum_in_chunks(lambda s, p=part: p.gradient(s).sum(0), count, part.size, memory)) for use, part in parts]  # type: ignore[misc]
    return torch.stack([apply_views(use.views, g) for use, g in sums]).sum(0)


def has_only_transposes(uses: Sequence[Use]) -> bool:
    return all(node.name() in ("TBackward0", "AddBackward0") for use in uses for node in use.views)


def can_join(uses: Sequence[Use]) -> bool:
    """Return True if g_m of all uses can be added: one use, or views that are only transposes."""
    return len(uses) == 1 or has_only_transposes(uses)


def _transpose(use: Use, g: Tensor) -> Tensor:
    transposes = [node for node in use.views if node.name() == "TBackward0"]
    return g.mT if has_only_transposes([use]) and len(transposes) % 2 else g


def _shape(use: Use) -> torch.Size | None:
    """Return the shape of the argument that the operation sees: the parameter's, or that of a view of it."""
    if use.views:
        return shape_of(use.views[0])
    leaf = use.node.next_functions[use.slot][0]
    variable = getattr(leaf, "variable", None)
    return None if variable is None else variable.shape
