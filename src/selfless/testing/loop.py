"""A run as an engineer would write it: a plain loop with `attach`, and with the random numbers of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfless.data import stream
from selfless.engine import rng
from selfless.keeper import Keeper, attach
from selfless.models import build
from selfless.preserve.capabilities import Encodes
from selfless.spec import Run

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params, run: torch.optim.SGD(params, lr=run.lr, momentum=run.momentum),
    "adam": lambda params, run: torch.optim.Adam(params, lr=run.lr, betas=(run.momentum, 0.999), weight_decay=run.weight_decay),
    "adamw": lambda params, run: torch.optim.AdamW(params, lr=run.lr, betas=(run.momentum, 0.999), weight_decay=run.weight_decay),
}


@dataclass(frozen=True)
class InLoop:
    """What a loop leaves: the network, its keeper, and accuracy[t][u] on task u after task t."""

    model: nn.Module
    keeper: Keeper
    accuracy: list[list[float]]


def train_in_loop(run: Run) -> InLoop:
    """Train `run` in a plain loop. The engine trains the same run to the same parameters, up to rounding.

    For small runs on a CPU, at a constant learning rate and without augmentation.
    """
    tasks = stream(run.stream, seed=run.seed)
    model = build(run.model, outputs=tasks.outputs, input_shape=tasks.input_shape, seed=run.seed)
    keeper = attach(model, run.preserve, run.sparsify, layers=list(model.hidden))  # type: ignore[arg-type]
    _place_heads(keeper, [task.heads[0] for task in tasks.tasks])
    accuracy = []
    for t, task in enumerate(tasks.tasks):
        data, head = task.train.resident(), slice(task.heads[0].start, task.heads[0].stop)
        optimizer = OPTIMIZERS[run.optimizer](model.parameters(), run)
        if run.anchor == "implicit":
            keeper.anchor_with(optimizer)
        model.train()
        for epoch in range(run.epochs):
            for part in keeper.parts:
                part.draw_noise = partial(_draw_noise, run, t)
            keeper.begin_epoch(epoch, run.epochs, batches=-(-len(data) // run.batch))
            order = rng.order(_key(run, "order", t, epoch), len(data))[0]
            for place, index in enumerate(order.split(run.batch)):
                x, y = data.batch(index)
                for part in keeper.parts:
                    if part.drops is not None:
                        part.drops.draw = _draw_nodes(run, t, epoch, place)
                loss = F.cross_entropy(model(x)[:, head], y - head.start) + keeper.penalty((x, y))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        order = torch.arange(len(data))
        if any(isinstance(term, Encodes) for term in run.preserve.parts):  # whose encoder reads the data in this order
            order = rng.order(_key(run, "encoder", t), len(data))[0]
        batches = [data.batch(index) for index in order.split(run.batch)]
        keeper.consolidate([(x, y - head.start) for x, y in batches], forward=partial(_outputs, head))
        model.eval()
        accuracy.append([_evaluate(model, keeper, other, min(u, t)) for u, other in enumerate(tasks.evaluate)])
    return InLoop(model, keeper, accuracy)


def _outputs(head: slice, model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(batch[0])
    return found[:, head]


def _evaluate(model: nn.Module, keeper: Keeper, task: Any, known: int) -> float:
    x, y = task.test.resident().batch(torch.arange(len(task.test)))
    start, stop = task.heads[0].start, task.heads[0].stop
    with keeper.evaluating(known), torch.no_grad():
        return float((model(x)[:, start:stop].argmax(1) == y - start).double().mean())


def _key(run: Run, *place: Any) -> Tensor:
    return rng.stream_key(torch.tensor([run.seed]), *place)


def _draw_noise(run: Run, task: int, n: int) -> Tensor:
    """Draw the noise from which the gates of a task start."""
    return rng.normal(_key(run, "gates", task, 0), n)[0]


def _draw_nodes(run: Run, task: int, epoch: int, place: int) -> Callable[[int], Tensor]:
    """Return the function that draws which nodes the engine turns off in a step."""
    key = _key(run, "drop", task, epoch)
    return lambda n: rng.uniform_at(key, place * run.batch * n + torch.arange(n))[0]


def _place_heads(keeper: Keeper, heads: list[range]) -> None:
    """Say whose head each row of the output layer is; `heads=` of `attach` speaks of whole parameters."""
    owner = torch.tensor([t for t, head in enumerate(heads) for _ in head], dtype=torch.int16)
    named = {name: p for name, p in keeper.model.named_parameters() if name.startswith("head.")}
    for part in keeper.parts:
        part.place_owners({name: owner.view(-1, *[1] * (p.dim() - 1)).expand(p.shape).clone() for name, p in named.items()})
