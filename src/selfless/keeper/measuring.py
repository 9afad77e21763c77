"""Measure Ω for the preservers of a keeper and α for its layers, on the data of a task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from selfless.distributed import Ranks
from selfless.importance import Loss, measure
from selfless.importance.objectives import with_loss
from selfless.keeper.activations import Collector
from selfless.keeper.part import Part
from selfless.keeper.storage import Choice, leaving_out
from selfless.network.calling import Forward
from selfless.preserve.base import measurements
from selfless.preserve.capabilities import Encodes, ProjectsSteps, Replays, WeighsNodes


def several_reads(parts: Sequence[Part]) -> bool:
    """Return True if the batches of a task are read more than once."""
    terms = [part.term for part in parts]
    return len(measurements(terms)) > 1 or any(isinstance(term, Encodes | ProjectsSteps | Replays | WeighsNodes) for term in terms)


@dataclass(frozen=True)
class Measuring:
    """How `consolidate` measures: its arguments forward, loss and memory, and

    all_layers   measure α also of layers whose activation is not known: no sparsifier needs it
    choice       the parameters to preserve; None: all
    ranks        the processes whose samples count
    """

    forward: Forward | None
    loss: Loss | None
    memory: int
    all_layers: bool
    choice: Choice | None
    ranks: Ranks


def measure_task(
    model: nn.Module, parts: Sequence[Part], collector: Collector, batches: Iterable[Any], how: Measuring
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return (Ω for each preserver, α by layer). Preservers with the same objective share a pass and its tensors."""
    omegas: list[dict[str, Tensor]] = [{} for _ in parts]
    alpha: dict[str, Tensor] = {}
    for one in measurements([part.term for part in parts]):
        if not one.users and not collector.taps:
            continue
        given = collector.complete_taps(batches, how.forward)
        with collector.pausing(), leaving_out(model, how.choice):
            found = measure(
                model,
                given,
                with_loss(one.objective, how.loss),
                alpha_objective=one.alpha_objective,
                taps={n: t for n, t in collector.taps.items() if t.complete or how.all_layers} if one.neurons else {},
                parameters=bool(one.users),
                estimator=one.estimator,
                forward=how.forward,
                memory=how.memory,
                lenient=collector.auto,
                ranks=how.ranks,
            )
        alpha = found.alpha if one.neurons else alpha
        for user in one.users:
            omegas[user] = dict(found.omega)
    return omegas, alpha
