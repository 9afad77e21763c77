"""The inputs of layers on some samples: C = Σ x xᵀ of every linear layer and convolution, for methods that protect what inputs span.

x is what one row of the weight is multiplied with: the input of a linear layer at each position, a patch of the input of a convolution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from selfless.importance.closed import chunk_memory, sum_in_chunks, unfold
from selfless.importance.graph import count_uses
from selfless.network.calling import evaluating
from selfless.network.roles import PLAIN

MEMORY = 2**27  # bytes of patches at a time


@dataclass(frozen=True)
class Inputs:
    """What a forward pass read.

    moments   {weight: C (d, d), in float64}, in the order in which the layers ran
    others    the names of all other parameters of modules that ran: biases, norms, embeddings, …
    """

    moments: dict[str, Tensor] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    def __add__(self, other: Inputs) -> Inputs:
        """Return what two forward passes read."""
        moments = {n: self.moments.get(n, 0) + other.moments.get(n, 0) for n in self.moments | other.moments}
        others = list(dict.fromkeys([*self.others, *other.others]))
        return Inputs({n: c for n, c in moments.items() if n not in others and isinstance(c, Tensor)}, others)


def measure_inputs(model: nn.Module, run: Callable[[], Any], wanted: Container[str], mask: Tensor | None = None) -> Inputs:
    """Call `run`, which runs the model and returns its output, in eval mode; return what the layers of the parameters `wanted` read.

    A weight that is read in another way too is among the others, as an embedding that is tied to the output layer, or a weight in
    F.linear(x, layer.weight): the output depends on it more often than its layer was called. `mask` (samples, tokens) is False at padded
    tokens, which are left out.
    """
    parameters = {n: p for n, p in model.named_parameters() if n in wanted}
    names = {id(p): n for n, p in parameters.items()}
    found, calls, read_otherwise = Inputs(), Counter[str](), dict[str, None]()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        is_whole = isinstance(module, nn.MultiheadAttention)  # torch reads the weights of its output projection, and never calls it
        for short, p in module.named_parameters(recurse=is_whole):
            name = names.get(id(p))
            if name is None:
                continue
            x = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
            if isinstance(module, PLAIN) and short == "weight" and x is not None:
                is_padded = mask is not None and isinstance(module, nn.Linear) and x.dim() == 3 and x.shape[:2] == mask.shape
                moment = second_moment(module, x * mask.unsqueeze(-1) if is_padded and mask is not None else x)
                found.moments[name] = found.moments[name] + moment if name in found.moments else moment
                calls[name] += 1
            else:
                read_otherwise[name] = None

    handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in model.modules() if next(m.parameters(), None) is not None]
    try:
        with torch.enable_grad(), evaluating(model):
            uses = count_uses(torch.utils._pytree.tree_leaves(run()))
    finally:
        for handle in handles:
            handle.remove()
    read_otherwise |= {name: None for name, p in parameters.items() if uses[p] > calls[name]}
    return Inputs({n: c for n, c in found.moments.items() if n not in read_otherwise}, list(read_otherwise))


def second_moment(module: nn.Module, x: Tensor) -> Tensor:
    """C = Σ x xᵀ over samples and positions, (d, d) in float64. The groups of a convolution share it, so it covers all of them."""
    if isinstance(module, nn.Linear):
        return _gram(x.detach().reshape(-1, x.shape[-1]).double())
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    x = x.detach() if x.dim() == module.weight.dim() else x.detach().unsqueeze(0)
    fan_in = module.weight[0].numel()

    def part(s: slice) -> Tensor:
        patches = unfold(module, x[s].double()).unflatten(1, (module.groups, fan_in))  # (m, groups, d, positions)
        return _gram(patches.movedim(2, -1).reshape(-1, fan_in))

    size = 8 * x[0].numel() * module.weight[0, 0].numel()
    return sum_in_chunks(part, len(x), size, chunk_memory(x, MEMORY))


def _gram(rows: Tensor) -> Tensor:
    found: Tensor = rows.mT @ rows
    return found


def draw_rows(batches: Iterable[Any], count: int, samples: int) -> list[Any]:
    """Return batches with about `samples` rows in all, evenly from the `count` batches: one batch if their shapes allow it, else more.

    A batch with a tensor of another number of rows, as the edges of a graph, is taken whole and alone: edges name rows of their batch.
    """
    taken, picked, is_whole = 0, list[Any](), False
    for i, batch in enumerate(batches):
        sizes = [len(leaf) for leaf in _tensors(batch) if leaf.dim()]
        rows = min(sizes[0] if sizes else 0, (i + 1) * samples // count - taken)
        if rows <= 0:
            continue
        if len(set(sizes)) > 1:
            rows, is_whole = sizes[0], True
        picked.append(_first_rows(batch, rows, sizes[0]))
        taken += rows
    shapes = {tuple(leaf.shape[1:] for leaf in _tensors(batch)) for batch in picked}
    if is_whole or len(picked) < 2 or len(shapes) > 1 or any(not leaf.dim() for batch in picked for leaf in _tensors(batch)):
        return picked
    flat = [torch.utils._pytree.tree_flatten(batch) for batch in picked]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return [torch.utils._pytree.tree_unflatten([torch.cat(c) if isinstance(c[0], Tensor) else c[0] for c in columns], flat[0][1])]


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def _first_rows(batch: Any, rows: int, size: int) -> Any:
    """Return copies of the first rows of every tensor of a batch that has one row for each of its `size` samples."""

    def cut(leaf: Any) -> Any:
        return leaf[:rows].clone() if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size else leaf

    return torch.utils._pytree.tree_map(cut, batch)
