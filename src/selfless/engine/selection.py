"""Which epoch a task ends with (`Run.select`): the tensors of each member's best epoch so far are kept, and loaded when the task ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfless.engine.fleet import Fleet
from selfless.engine.stack import Tensors
from selfless.preserve.capabilities import Gated


def epoch_tensors(fleet: Fleet) -> Tensors:
    """Return what an epoch trains, over members: parameters, buffers, and gates, which must be of the same epoch as the weights."""
    trained = {name: tensor.detach() for name, tensor in (fleet.params | fleet.buffers).items()}
    for i, part in enumerate(fleet.parts):
        if isinstance(part.term, Gated):
            trained |= {f"{i}/{group}/{name}": t for group in part.step_groups for name, t in part.state[group].items()}
    return trained


def keep_best(best: Tensors, fleet: Fleet, improved: Sequence[bool]) -> Tensors:
    """Return the tensors of the best epochs after an epoch in which some members have improved; `best` is {} before the first."""
    current = epoch_tensors(fleet)
    if not best:
        return {name: tensor.clone() for name, tensor in current.items()}
    where = torch.tensor(improved, device=fleet.device)
    for name, tensor in current.items():
        best[name][where] = tensor[where]
    return best


def load_best(best: Tensors, fleet: Fleet) -> None:
    """Write the tensors of the best epochs into the fleet."""
    with torch.no_grad():
        current = epoch_tensors(fleet)
        for name, tensor in best.items():
            current[name].copy_(tensor)
