"""Exact importance: in the engine beside a training epoch of the same samples, in plain PyTorch beside simpler passes.

The simpler passes are one forward and backward pass over the batches, and a loop over samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selfless import importance
from selfless.bench.eager import build_network, forward_backward, loop_over_samples, random_batches, random_samples
from selfless.bench.engine import EngineFleet, Workload, cnn, mlp
from selfless.bench.limits import limit_of
from selfless.bench.plan import Plan
from selfless.bench.table import Row, format_number, make_row, make_target
from selfless.bench.timing import time_in_turn

LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {  # (L_m, p) of mean_m |∂L_m/∂θ|ᵖ
    "mas, per sample": (lambda out, _: out.square().sum(), 1),
    "ewc, per sample": (lambda out, y: -F.cross_entropy(out, y, reduction="sum"), 2),
}


def run(plan: Plan) -> Iterator[Row]:
    """Yield the rows of the engine, and on a CPU those of plain PyTorch."""
    for workload, samples, limit in ((mlp(), plan.mlp_samples, 1.0), (cnn(), plan.cnn_samples, 2.0)):
        for members in plan.importance_fleets:
            yield _engine_row(plan, workload, members, samples, limit)
    if plan.device.type == "cpu":
        yield from _eager_rows(plan, mlp(plan.eager_width), plan.eager_samples[0], 5 * plan.loop_samples, 1.5)
        yield from _eager_rows(plan, cnn(), plan.eager_samples[1], plan.loop_samples, 1.3)


def _engine_row(plan: Plan, workload: Workload, members: int, samples: int, limit: float) -> Row:
    """Compare the importance pass over a task with one training epoch of it, both for the whole fleet."""
    title = f"{workload.title}, importance of {samples:,} samples, fleet of {members}"
    plan.say(title)
    try:  # two fleets, because the importance pass ends a task
        trains, measures = (EngineFleet(workload, members, samples, plan.device, batch=plan.batch) for _ in range(2))
        products = limit_of(workload, members, plan.batch, plan.device, updates=False)
        functions = {"epoch": trains.train_epoch, "importance": measures.consolidate, "limit": products}
        times = time_in_turn(functions, plan.rounds, plan.device)
    except torch.cuda.OutOfMemoryError:
        return make_row(title, says="out of memory", network=workload.model, members=members)
    ratio = times.ratio("importance", "epoch")
    return make_row(
        title,
        times.best("importance"),
        rate=f"{format_number(members * samples / times.best('importance'))} samples/s",
        says=f"{ratio:.2f} of a training epoch",
        target=make_target(ratio, "≤", limit, "×") if plan.device.type == "cuda" else None,
        network=workload.model,
        members=members,
        samples=samples,
        epoch_seconds=times.best("epoch"),
        of_an_epoch=ratio,
        of_limit=times.best("limit") * trains.steps / times.best("importance"),
        of_an_epoch_median=times.median_ratio("importance", "epoch"),
        rounds=times.rounds,
    )


def _eager_rows(plan: Plan, workload: Workload, samples: int, loop_samples: int, limit: float) -> list[Row]:
    """Compare `selfless.importance` with a forward and backward pass, and with a loop over `loop_samples` samples."""
    plan.say(f"{workload.title}, importance of {samples:,} samples in plain PyTorch")
    model, batches = build_network(workload, plan.device), random_batches(workload, samples, plan.batch, plan.device)
    x, y = random_samples(workload, loop_samples, plan.device)
    base = "forward + backward"
    loops = {f"loop: {name}": lambda f=f, p=p: loop_over_samples(model, x, y, f, p) for name, (f, p) in LOSSES.items()}
    passes: dict[str, Callable[[], object]] = {
        base: lambda: forward_backward(model, batches),
        "mas, per sample": lambda: importance.mas(model, batches),
        "ewc, per sample": lambda: importance.ewc(model, batches),
        "mas, per batch": lambda: importance.mas(model, batches, estimator="per-batch"),
        "ewc, per batch": lambda: importance.ewc(model, batches, estimator="per-batch"),
    }
    products = limit_of(workload, 1, plan.batch, plan.device, updates=False)
    times = time_in_turn({**passes, **loops, "limit": products}, plan.rounds, plan.device)
    rows = []
    for name in passes:
        ratio, seconds = times.ratio(name, base), times.best(name)
        says = "" if name == base else f"{ratio:.2f} of {base}"
        figures: dict[str, Any] = {"of_forward_backward": ratio, "of_forward_backward_median": times.median_ratio(name, base)}
        figures["of_limit"] = times.best("limit") * len(batches) / seconds
        if name in LOSSES:
            loop = times.best(f"loop: {name}") * samples / loop_samples
            says += f", {format_number(loop / seconds)}× as fast as a loop over samples"
            figures |= {"loop_seconds": loop, "times_loop": loop / seconds, "loop_samples": loop_samples}
            figures |= {"loop_rounds": times.rounds[f"loop: {name}"]}
        rows.append(
            make_row(
                f"{workload.title}, {name}, {samples:,} samples, eager",
                seconds,
                rate=f"{format_number(samples / seconds)} samples/s",
                says=says,
                target=make_target(ratio, "≤", limit, "×") if name in LOSSES and not plan.quick else None,
                network=workload.model,
                samples=samples,
                rounds=times.rounds[name],
                **figures,
            )
        )
    return rows
