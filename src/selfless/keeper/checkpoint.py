"""Save a model, its keeper and its optimizer from all ranks, and go on with another number of ranks, sharded or whole.

    checkpoint.save("at", keeper, optimizer)       # on each rank
    checkpoint.load("at", keeper, optimizer)       # on each rank of a new job; then keeper.anchor_with(optimizer)

The files are those of torch.distributed.checkpoint: each rank writes its shards. They are written to a new folder next to the old one,
which takes its place when all ranks are done. So a job that dies while it saves leaves the last checkpoint whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from selfless.distributed import Ranks
from selfless.distributed.shards import is_sharded, like, local
from selfless.keeper.keeper import Keeper
from selfless.network.calling import Forward

KEEPER = "keeper."


def is_whole(folder: str | Path) -> bool:
    """Return True if a folder has a complete checkpoint."""
    return (Path(folder) / ".metadata").is_file()


def save(folder: str | Path, keeper: Keeper, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Save the model, the keeper and the optimizer in a folder. Each rank must call it."""
    from torch.distributed.checkpoint.state_dict_saver import save as write

    folder, ranks = Path(folder), keeper.ranks
    new, old = folder.with_name(f"{folder.name}.new"), folder.with_name(f"{folder.name}.old")
    if ranks.rank == 0:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
    _wait(ranks)
    state = _model_state(keeper, optimizer) | {f"{KEEPER}{name}": t for name, t in keeper.state_dict().items()}
    with ranks.talking():
        write(state, checkpoint_id=new, process_group=ranks.group, no_dist=ranks.is_alone and not dist.is_initialized())
    if ranks.rank == 0:
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    _wait(ranks)


def load(
    folder: str | Path,
    keeper: Keeper,
    optimizer: torch.optim.Optimizer | None = None,
    forwards: Sequence[Forward | None] | None = None,
) -> None:
    """Load what `save` saved, into a keeper with the same terms. `forwards` is that of `Keeper.load_state_dict`."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as read

    folder = next((f for f in (Path(folder), Path(f"{folder}.old")) if is_whole(f)), Path(folder))
    if not is_whole(folder):
        raise FileNotFoundError(f"{folder} has no complete checkpoint; give a folder that selfless.keeper.checkpoint.save wrote")
    ranks = keeper.ranks
    keeper.follow_model()
    saved = _model_state(keeper, optimizer)
    saved |= _empty_state(keeper, FileSystemReader(folder).read_metadata().state_dict_metadata)
    with ranks.talking():
        read(saved, checkpoint_id=folder, process_group=ranks.group, no_dist=ranks.is_alone and not dist.is_initialized())
    set_model_state_dict(keeper.model, saved["model"])
    if optimizer is not None:
        set_optimizer_state_dict(keeper.model, optimizer, saved["optimizer"])
    keeper.load_state_dict({name.removeprefix(KEEPER): t for name, t in saved.items() if name.startswith(KEEPER)}, forwards)


def _model_state(keeper: Keeper, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the states of model and optimizer, with names of parameters."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    found: dict[str, Any] = {"model": get_model_state_dict(keeper.model)}
    return found | ({} if optimizer is None else {"optimizer": get_optimizer_state_dict(keeper.model, optimizer)})


def _empty_state(keeper: Keeper, saved: dict[str, Any]) -> dict[str, Tensor]:
    """Return an empty tensor for each one of the saved keeper, sharded like the parameter that it is named after."""
    parameters = dict(keeper.model.named_parameters())
    found: dict[str, Tensor] = {}
    for key, about in saved.items():
        if not key.startswith(KEEPER):
            continue
        owners = [p for name, p in parameters.items() if key.endswith(f".{name}") and p.shape == about.size]
        dtype = about.properties.dtype
        if owners and is_sharded(owners[0]):
            found[key] = like(torch.empty_like(local(owners[0]), dtype=dtype), owners[0])
        else:
            found[key] = torch.empty(about.size, dtype=dtype)
    return found


def _wait(ranks: Ranks) -> None:
    """Wait until each rank has come here."""
    if not ranks.is_alone:
        with ranks.talking():
            dist.barrier(group=ranks.group)
