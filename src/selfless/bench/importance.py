"""Exact importance beside a training epoch of the same samples in the same engine; and in plain PyTorch beside a forward and backward
pass, and beside the loop over samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selfless import importance
from selfless.bench.eager import batches, images, loop_over_samples, network, plain_pass
from selfless.bench.plan import Plan
from selfless.bench.rig import Network, Rig, cnn, mlp
from selfless.bench.rows import Row, aim, many, row
from selfless.bench.timing import interleaved

LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "mas, per sample": (lambda out, _: out.square().sum(), 1),
    "ewc, per sample": (lambda out, y: -F.cross_entropy(out, y, reduction="sum"), 2),
}


def run(plan: Plan) -> Iterator[Row]:
    for kind, samples, limit in ((mlp(), plan.mlp_samples, 1.0), (cnn(), plan.cnn_samples, 2.0)):
        for members in plan.measured:
            yield _engine(plan, kind, members, samples, limit)
    if plan.device.type == "cpu":
        yield from _eager(plan, mlp(plan.eager_width), plan.eager_samples[0], 5 * plan.looped, 1.5)
        yield from _eager(plan, cnn(), plan.eager_samples[1], plan.looped, 4.0)


def _engine(plan: Plan, kind: Network, members: int, samples: int, limit: float) -> Row:
    """The pass over a task against one training epoch of it, both of the whole fleet."""
    title = f"{kind.title}, importance of {samples:,} samples, fleet of {members}"
    plan.say(title)
    try:
        trains, measures = (Rig(kind, members, samples, plan.device, batch=plan.batch) for _ in range(2))  # apart: measuring ends a task
        times = interleaved({"epoch": trains.epoch, "importance": measures.consolidate}, plan.rounds, plan.device)
    except torch.cuda.OutOfMemoryError:
        return row(title, says="out of memory", network=kind.model, members=members)
    ratio = times.ratio("importance", "epoch")
    return row(
        title,
        times.best("importance"),
        rate=f"{many(members * samples / times.best('importance'))} samples/s",
        says=f"{ratio:.2f} of a training epoch",
        target=aim(ratio, "≤", limit, "×") if plan.device.type == "cuda" else None,
        network=kind.model,
        members=members,
        samples=samples,
        epoch_seconds=times.best("epoch"),
        of_an_epoch=ratio,
        of_an_epoch_median=times.paired("importance", "epoch"),
        rounds=times.rounds,
    )


def _eager(plan: Plan, kind: Network, samples: int, looped: int, limit: float) -> list[Row]:
    plan.say(f"{kind.title}, importance of {samples:,} samples in plain PyTorch")
    model, pairs = network(kind, plan.device), batches(kind, samples, plan.batch, plan.device)
    x, y = images(kind, looped, plan.device)
    loops = {f"loop: {name}": lambda f=f, p=p: loop_over_samples(model, x, y, f, p) for name, (f, p) in LOSSES.items()}
    passes: dict[str, Callable[[], object]] = {
        "forward + backward": lambda: plain_pass(model, pairs),
        "mas, per sample": lambda: importance.mas(model, pairs),
        "ewc, per sample": lambda: importance.ewc(model, pairs),
        "mas, per batch": lambda: importance.mas(model, pairs, estimator="per-batch"),
        "ewc, per batch": lambda: importance.ewc(model, pairs, estimator="per-batch"),
    }
    times = interleaved({**passes, **loops}, plan.rounds, plan.device)
    rows = []
    for name in passes:
        ratio, seconds = times.ratio(name, "forward + backward"), times.best(name)
        says = "" if name == "forward + backward" else f"{ratio:.2f} of forward + backward"
        figures: dict[str, Any] = {"of_forward_backward": ratio, "of_forward_backward_median": times.paired(name, "forward + backward")}
        if name in LOSSES:
            loop = times.best(f"loop: {name}") * samples / looped
            says += f", {many(loop / seconds)}× as fast as a loop over samples"
            figures |= {"loop_seconds": loop, "times_loop": loop / seconds, "loop_samples": looped}
            figures |= {"loop_rounds": times.rounds[f"loop: {name}"]}
        rows.append(
            row(
                f"{kind.title}, {name}, {samples:,} samples, eager",
                seconds,
                rate=f"{many(samples / seconds)} samples/s",
                says=says,
                target=aim(ratio, "≤", limit, "×") if name in LOSSES and not plan.quick else None,
                network=kind.model,
                samples=samples,
                rounds=times.rounds[name],
                **figures,
            )
        )
    return rows
