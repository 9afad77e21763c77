"""A keeper whose model several processes train: what it can do there, and whether all ranks agree.

With DistributedDataParallel each rank has the whole state. With FSDP2 each rank has the rows of its shards, and a preserver can be used if
it treats each entry of a parameter alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from selfless.capacity.counts import Capacity, Free, count_free
from selfless.capacity.rooms import LayerRoom
from selfless.distributed import Ranks
from selfless.distributed.shards import fsdp_modules, is_sharded, local
from selfless.keeper.part import Part
from selfless.preserve.base import importance_of
from selfless.preserve.capabilities import Anchored
from selfless.sparsify import Sparsifier

UNEQUAL = (
    "train one model on all ranks, wrapped in DistributedDataParallel, with the same calls of the keeper on each rank; if each process "
    "trains a model of its own, write attach(…, process_group=False)"
)


def check_terms(parts: Sequence[Part], sparsifiers: Sequence[Sparsifier], model: nn.Module, implicit: bool, inject: bool) -> None:
    """Raise ValueError for a term that cannot be used with FSDP2, with the remedy."""
    if not fsdp_modules(model):
        return
    for part in parts:
        name = type(part.term).__name__
        if not part.term.works_on_shards:
            raise ValueError(
                f"{name} needs whole parameters, and FSDP2 shards them; docs/scale.md lists the preservers for FSDP2. "
                "Use one of them, or train with DistributedDataParallel"
            )
        if isinstance(part.term, Anchored) and part.is_on and not implicit:
            raise ValueError(f"with FSDP2 the anchor of {name} must be implicit: call keeper.anchor_with(optimizer) before training")
        if part.storage.device is not None:
            raise ValueError("state_device= does not work with FSDP2; use its CPUOffloadPolicy, which the state follows")
    if inject:
        raise ValueError("inject=True does not work with FSDP2; attach without it and add keeper.penalty() to the loss")
    weights = [term for term in sparsifiers if term.is_on and term.reads != "activations"]
    if weights:
        raise ValueError(f"{type(weights[0]).__name__} reads weights, and FSDP2 shards them; use a sparsifier that reads activations")


def check_same(ranks: Ranks, parts: Sequence[Part], parameters: Mapping[str, Tensor], alpha: Mapping[str, Tensor]) -> None:
    """Raise RuntimeError if parameters, states or α differ between ranks. Sharded tensors are skipped: they do differ."""
    tensors = {f"parameter {name!r}": p for name, p in parameters.items()}
    for part in parts:
        for group, found in part.state.items():
            tensors |= {f"{group} of {name!r} in the state": t for name, t in found.items()}
    tensors |= {f"α of layer {name!r}": a for name, a in alpha.items()}
    ranks.check_same({name: t for name, t in tensors.items() if not is_sharded(t)}, UNEQUAL)


def count_capacity(
    model: nn.Module,
    parts: Sequence[Part],
    alpha: Mapping[str, Tensor],
    tasks: int,
    threshold: float,
    ranks: Ranks,
    layers: dict[str, LayerRoom],
) -> Capacity:
    """Return the free parameters and neurons; of sharded parameters, over all ranks. A parameter without an importance is free."""
    omega = importance_of([part.term for part in parts], [part.rows for part in parts])
    neurons = {name: count_free(a, threshold) for name, a in alpha.items()}
    if omega is None:
        return Capacity({}, neurons, tasks, threshold, layers)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad or n in omega}
    rows = {name: local(p) for name, p in named.items()}
    found = {name: count_free(omega.get(name, torch.zeros_like(p)), threshold) for name, p in rows.items()}
    sharded = [name for name, p in named.items() if is_sharded(p)]
    if sharded:
        free = torch.tensor([found[name].free for name in sharded], device=rows[sharded[0]].device)
        ranks.sum_([free])
        found |= {name: Free(int(n), named[name].numel()) for name, n in zip(sharded, free, strict=True)}
    return Capacity(found, neurons, tasks, threshold, layers)
