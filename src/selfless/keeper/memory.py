"""The memory of old samples in a training loop: fill it when a task ends, and replay a batch of it in each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfless.distributed import ALONE, Ranks
from selfless.functional import reservoir
from selfless.network.calling import Forward, check_labels, evaluating, labels_of, run_batch, to_device
from selfless.preserve.base import widened
from selfless.preserve.capabilities import Replays, State

INPUT = "input."  # the names of what the model is called with: input.0, input.1, … of a tuple, input.KEY of a dict


def fill_memory(
    model: nn.Module, term: Replays, state: State, batches: Iterable[Any], forward: Forward | None, task: int, ranks: Ranks = ALONE
) -> State:
    """Return the state after the samples of a task that has ended. Keys are drawn from torch's global generator.

    Several ranks fill one memory: each finds the smallest keys of its own samples, and all of them take the smallest of all.
    """
    before = state
    for raw in batches:
        batch = to_device(raw, model)
        inputs, labels = _inputs(term, batch), _labels(term, batch)
        keys = torch.randint(2**62, labels.shape).to(labels.device)
        old = term.memory(state)
        is_full = bool(old) and len(old["key"]) >= term.samples
        enters = (keys < old["key"].max()).nonzero().flatten() if is_full else reservoir(keys, term.samples)
        if not len(enters):
            continue
        rows = {name: t[enters] for name, t in inputs.items()} | {"label": labels[enters], "key": keys[enters]}
        with torch.no_grad(), evaluating(model):
            outputs = widened(run_batch(model, _batch(rows), forward))
        if outputs.dim() != 2:
            raise ValueError(
                f"{type(term).__name__} replays samples with one label each, but the outputs have the shape {tuple(outputs.shape)}; "
                "pass consolidate(…, forward=…) that returns (samples, classes)"
            )
        check_labels(labels, outputs.shape[1], ignored=None)
        span = (("first", 0), ("last", outputs.shape[1]), ("task", task))
        rows |= {name: torch.full_like(rows["key"], value) for name, value in span}
        if term.keeps_logits:
            rows["logits"] = outputs
        state = term.remember(*_of_one_shape(term, state, rows))
    if ranks.is_alone:
        return state
    found = term.memory(state)
    is_new = found["task"] == task
    new = {name: torch.cat(ranks.gather_rows(found[name][is_new])) for name in sorted(found)}
    return term.remember(*_of_one_shape(term, before, new))


def replay_cost(model: nn.Module, term: Replays, state: State, forwards: Sequence[Forward | None]) -> Tensor:
    """Return the mean loss of a batch drawn from the memory. Each sample is run with the `forward` of its task."""
    memory = term.memory(state)
    drawn = reservoir(torch.rand(len(memory["key"])), term.batch).to(memory["key"].device)
    losses = []
    for forward in dict.fromkeys(forwards):
        tasks = torch.tensor([t for t, other in enumerate(forwards) if other is forward], device=drawn.device)
        chosen = drawn[torch.isin(memory["task"][drawn], tasks)]
        if not len(chosen):
            continue
        rows = {name: t[chosen] for name, t in memory.items()}
        outputs = run_batch(model, _batch(rows), forward)
        if "logits" in rows:
            rows["logits"] = _padded(rows["logits"], outputs.shape[1])[:, : outputs.shape[1]]
        losses.append(term.replay_loss(outputs, rows, torch.ones_like(outputs, dtype=torch.bool)))
    return torch.cat(losses).mean()


def _inputs(term: Replays, batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch by name; each has one row per sample."""
    items = batch if isinstance(batch, dict) else dict(enumerate(batch)) if isinstance(batch, (tuple, list)) else {0: batch}
    found = {f"{INPUT}{name}": t for name, t in items.items()}
    if not all(isinstance(t, Tensor) and t.dim() for t in found.values()) or len({len(t) for t in found.values()}) > 1:
        raise ValueError(f"{type(term).__name__} stores samples: every item of a batch must be a tensor with one row per sample")
    return found


def _labels(term: Replays, batch: Any) -> Tensor:
    """Return the classes of a batch, (M,)."""
    labels = labels_of(batch)
    if labels is None or labels.dim() != 1 or labels.is_floating_point():
        raise ValueError(
            f"{type(term).__name__} needs the class of each sample: call consolidate() with (x, y) pairs or dicts with 'labels', "
            "y one whole number per sample"
        )
    return labels.long()


def _batch(rows: Mapping[str, Tensor]) -> Any:
    """Return the batch that the model is called with: a dict, or a list if the names are numbers."""
    items = {name.removeprefix(INPUT): t for name, t in rows.items() if name.startswith(INPUT)}
    return [items[str(i)] for i in range(len(items))] if "0" in items else items


def _of_one_shape(term: Replays, state: State, new: dict[str, Tensor]) -> tuple[State, dict[str, Tensor]]:
    """Return state and rows with logits of one width; raise ValueError if samples have different shapes."""
    old = dict(term.memory(state))
    if not old:
        return state, new
    for name in new:
        if name.startswith(INPUT) and (name not in old or old[name].shape[1:] != new[name].shape[1:]):
            was = tuple(old[name].shape[1:]) if name in old else "not there"
            raise ValueError(
                f"{type(term).__name__} stores samples of one shape, but {name.removeprefix(INPUT)!r} of a batch is "
                f"{tuple(new[name].shape[1:])} and was {was} before; pad or resize the samples to one shape"
            )
    if "logits" in new:
        width = max(old["logits"].shape[1], new["logits"].shape[1])
        old["logits"], new["logits"] = _padded(old["logits"], width), _padded(new["logits"], width)
    return term.with_memory(state, old), new


def _padded(logits: Tensor, width: int) -> Tensor:
    """Return logits (M, C) with zeros up to `width` columns."""
    return F.pad(logits, (0, max(0, width - logits.shape[1])))
