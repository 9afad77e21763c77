"""Parameters that FSDP2 shards (`torch.distributed.fsdp.fully_shard`): their local shards, and sums that are sharded like them.

A sharded parameter is a DTensor. Each rank computes with its own rows, and no function here gathers a whole model. What is stored (Ω, θ*)
is a DTensor too, so that torch.distributed.checkpoint can save it and load it with another number of ranks.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from selfless.distributed.ranks import Ranks

_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)  # its new and old name


def is_sharded(tensor: Tensor) -> bool:
    """Return True for a DTensor. Its module is not imported for this: where it was not imported, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the rows of this rank, without a copy; any other tensor unchanged."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local_values(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the local rows of each tensor."""
    return {name: local(t) for name, t in tensors.items()}


def like(rows: Tensor, parameter: Tensor) -> Tensor:
    """Return the rows of this rank as a DTensor that is sharded like `parameter`; the rows themselves if that is not sharded."""
    if not is_sharded(parameter) or is_sharded(rows):
        return rows
    from torch.distributed.tensor import DTensor

    p: Any = parameter
    found: Tensor = DTensor.from_local(rows, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
    return found


def place_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a saved tensor in the layout of a parameter: sharded like it, or whole."""
    if is_sharded(parameter) and not is_sharded(tensor):
        from torch.distributed.tensor import distribute_tensor

        p: Any = parameter
        return distribute_tensor(tensor.to(p.device), p.device_mesh, p.placements, src_data_rank=None)
    if is_sharded(tensor) and not is_sharded(parameter):
        whole: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
        return whole
    return tensor


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was called on."""
    module = sys.modules.get("torch.distributed.fsdp")
    return [] if module is None else [m for m in model.modules() if isinstance(m, module.FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Make each parameter a DTensor again: after a forward pass without a backward pass some are still whole."""
    for module in fsdp_modules(model):
        module.reshard()


def check_shards(parameters: Mapping[str, Tensor], ranks: Ranks) -> bool:
    """Return True if the parameters are sharded. Raise ValueError for a layout that is not supported."""
    sharded = [name for name, p in parameters.items() if is_sharded(p)]
    if not sharded:
        return False
    whole = [name for name in parameters if name not in set(sharded)]
    if whole:
        raise ValueError(f"parameter {sharded[0]!r} is sharded but {whole[0]!r} is not: call fully_shard(model) on the whole model too")
    p: Any = parameters[sharded[0]]
    if p.device_mesh.ndim > 1 or not all(placement.is_shard() for placement in p.placements):
        raise ValueError(
            f"parameter {sharded[0]!r} has the placements {p.placements} on a mesh of {p.device_mesh.ndim} dimensions; "
            "a keeper supports fully_shard on a mesh of one dimension"
        )
    if p.device_mesh.size() != ranks.size:
        raise ValueError(
            f"the model is sharded over {p.device_mesh.size()} ranks, but the keeper reduces over {ranks.size}: "
            "write attach(…, process_group=mesh.get_group())"
        )
    return True


def watch_whole_parameters(model: nn.Module, found: dict[str, nn.Parameter]) -> list[Any]:
    """Add hooks that note in `found`, in each forward pass, the whole parameters that FSDP2 puts into the graph. Return their handles."""
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, *_: Any) -> None:
        prefix = names[module]
        for name, p in module.named_parameters():
            if not is_sharded(p):
                found[f"{prefix}.{name}" if prefix else name] = p

    return [module.register_forward_pre_hook(note) for module in fsdp_modules(model)]  # FSDP2 puts its own hook first


class ShardedSums(dict[str, Tensor]):
    """Sums over the samples of all ranks, by parameter; each rank has only the rows of its shard."""

    def __init__(self, parameters: Mapping[str, Tensor], ranks: Ranks, is_live: Callable[[], bool]) -> None:
        super().__init__()
        self._parameters, self._ranks, self._is_live = parameters, ranks, is_live

    def add(self, name: str, value: Tensor) -> None:
        """Add the sum over the samples of one batch of each rank; `value` has the shape of the whole parameter."""
        if name not in self._parameters:
            return
        p: Any = self._parameters[name]
        value = value.to_dense() if value.is_sparse else value
        rows = self._scatter(value if self._is_live() else torch.zeros_like(value), p.placements[0].dim, local(p))
        if name in self:
            self[name].add_(rows)
        else:
            self[name] = rows

    def _scatter(self, value: Tensor, dim: int, shard: Tensor) -> Tensor:
        """Return the shard of this rank of Σ_r value_r. Shards are chunks of ⌈n/W⌉ rows; the last ones may be shorter or empty."""
        value = value.movedim(dim, 0)
        rows = -(-len(value) // self._ranks.size)
        missing = rows * self._ranks.size - len(value)
        padded = torch.cat([value, value.new_zeros((missing, *value.shape[1:]))]) if missing else value.contiguous()
        found = torch.empty_like(padded[:rows])
        with self._ranks.talking():
            _reduce_scatter(found, padded, group=self._ranks.group)
        return found[: shard.shape[dim]].movedim(0, dim).clone()


def agree(ranks: Ranks, names: Iterable[str], device: torch.device) -> bool:
    """Return True if all ranks have the same names in the same order."""
    digest = torch.tensor(zlib.crc32("\n".join(names).encode()), device=device)
    return len({int(d) for d in ranks.gather(digest)}) == 1
