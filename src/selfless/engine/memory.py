"""The memory of old samples of a fleet: fill it when a task ends, and replay a batch of it in each step.

Keys and draws are hashes of (seed, purpose, task, epoch, position), so they do not depend on the other members of a fleet. A step only
reads the memory, so a CUDA graph can capture it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfless.engine import rng
from selfless.engine.part import Part
from selfless.functional import reservoir
from selfless.preserve.capabilities import Replays, Tensors

if TYPE_CHECKING:
    from selfless.engine.fleet import Fleet

POSITIVE = 0x7FFFFFFFFFFFFFFF


@torch.no_grad()
def fill_memory(part: Part, fleet: Fleet, head: slice, order: Tensor | None) -> None:
    """Add the samples of a task that has ended to the memory of every member, if the preserver has one.

    Every sample has a random key. Only those with the smallest keys can stay, so only those are read.

    head    the output columns of the task
    order   the rows of the samples (F, n), if a task draws them by weight; None: row i is sample i
    """
    term, data = part.term, fleet.step.data
    if not isinstance(term, Replays):
        return
    keys = rng.words(rng.stream_key(fleet.seeds, "memory", fleet.tasks), data.n) & POSITIVE
    kept = reservoir(keys, term.samples)
    x, y = data.batch(kept if order is None else order.gather(1, kept), fleet.still)
    size = fleet.at_once(data)
    logits = [fleet.stack.outputs(fleet.params, fleet.buffers, some.to(fleet.step.dtype))[0].float() for some in x.split(size, 1)]
    first, last, _ = head.indices(logits[0].shape[-1])
    new = {"key": keys.gather(1, kept), "label": y, "input.x": x}
    new |= {name: torch.full_like(y, value) for name, value in (("first", first), ("last", last), ("task", fleet.tasks))}
    new |= {"logits": torch.cat(logits, 1)} if term.keeps_logits else {}
    part.remember(new)


def draw_rows(part: Part, key: Tensor, cursor: Tensor) -> Tensors:
    """Return the rows of the memory that a step replays, (F, B, …): a draw without replacement. Empty without a memory.

    The draw depends on each member's `key` and on `cursor`, the number of samples so far in this epoch.
    """
    term = part.term
    memory = term.memory(part.state) if isinstance(term, Replays) else {}
    if not isinstance(term, Replays) or not memory:
        return {}
    members, size = memory["key"].shape
    noise = rng.uniform_at(key, cursor * size + torch.arange(size, device=key.device))
    drawn = reservoir(noise, term.batch)
    rows = torch.arange(members, device=key.device).unsqueeze(1)
    return {name: t[rows, drawn] for name, t in memory.items()}


def replay_cost(term: Replays, outputs: Tensor, rows: Tensors, head: slice, rates: Tensor) -> Tensor:
    """Σ_f rate_f mean_b loss of the replayed samples, given their outputs (F, B, C).

    A sample is classified among the columns of its own task. If the head of the current task contains these (all classes seen so far),
    it is classified among the columns of the current head.
    """
    first, last, _ = head.indices(outputs.shape[-1])
    columns = term.own_columns(rows, outputs)
    contained = (first <= rows["first"]) & (rows["last"] <= last)
    now = torch.arange(outputs.shape[-1], device=outputs.device)
    columns = columns | (contained.unsqueeze(-1) & (first <= now) & (now < last))
    losses = term.replay_loss(outputs, rows, columns)
    return ((rates / losses.shape[1]).unsqueeze(1) * losses).sum()
