"""Exact importance beside a plain forward and backward pass over the same batches, and beside the loop over samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.timing import interleaved
from selfless import importance, models

Batches = list[tuple[Tensor, Tensor]]


def run(console: Console, quick: bool = False) -> list[dict[str, Any]]:
    mlp = models.build("mlp-512", outputs=10, input_shape=(1, 28, 28), seed=0)
    cnn = models.build("cnn-256", outputs=100, input_shape=(3, 32, 32), seed=0)
    cases = [
        ("MLP 784-512-512-10", mlp, _data((1, 28, 28), 10, 6_000 if quick else 60_000), 1.5, 100 if quick else 1_000),
        ("CIFAR network, FC 256", cnn, _data((3, 32, 32), 100, 400 if quick else 2_000), 4.0, 50 if quick else 200),
    ]
    return [_case(console, *case, repeats=2 if quick else 5) for case in cases]


def _case(console: Console, title: str, model: nn.Module, batches: Batches, target: float, looped: int, repeats: int) -> dict[str, Any]:
    samples = sum(len(y) for _, y in batches)
    x, y = torch.cat([x for x, _ in batches])[:looped], torch.cat([y for _, y in batches])[:looped]
    losses: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
        "mas, per sample": (lambda out, _: out.square().sum(), 1),
        "ewc, per sample": (lambda out, y: -F.cross_entropy(out, y, reduction="sum"), 2),
    }
    loops = {f"loop: {name}": lambda f=f, p=p: loop(model, x, y, f, p) for name, (f, p) in losses.items()}
    times = interleaved(
        {
            "forward + backward": lambda: plain(model, batches),
            "mas, per sample": lambda: importance.mas(model, batches),
            "ewc, per sample": lambda: importance.ewc(model, batches),
            "mas, per batch": lambda: importance.mas(model, batches, estimator="per-batch"),
            "ewc, per batch": lambda: importance.ewc(model, batches, estimator="per-batch"),
            **loops,
        },
        repeats,
    )
    loop_seconds = {name: times.best(f"loop: {name}") * samples / looped for name in losses}

    table = Table(title=f"{title}, {samples:,} samples, batches of {len(batches[0][1])}; loop timed on {looped:,} samples and scaled")
    for column in ("pass", "seconds", "× forward + backward", "(median of rounds)", "target", "× faster than the loop"):
        table.add_column(column, justify="left" if column == "pass" else "right")
    rows = []
    for name in [name for name in times.rounds if name not in loops]:
        ratio, paired, exact = times.ratio(name, "forward + backward"), times.paired(name, "forward + backward"), name in losses
        row = {"pass": name, "seconds": times.best(name), "ratio": ratio, "ratio_median": paired, "rounds": times.rounds[name]}
        row |= {"target": target, "met": ratio <= target} if exact else {}
        if exact:
            row |= {"loop_seconds": loop_seconds[name], "loop_ratio": loop_seconds[name] / times.best(name)}
            row |= {"loop_rounds": times.rounds[f"loop: {name}"]}
        rows.append(row)
        table.add_row(
            name,
            f"{times.best(name):.3f}",
            f"{ratio:.2f}",
            f"{paired:.2f}",
            f"≤ {target} {'✓' if ratio <= target else '✗'}" if exact else "",
            f"{row['loop_ratio']:.0f}" if exact else "",
        )
    console.print(table)
    return {"network": title, "samples": samples, "batch": len(batches[0][1]), "loop_samples": looped, "passes": rows}


def plain(model: nn.Module, batches: Batches) -> None:
    """The price of one epoch without its optimizer."""
    for x, y in batches:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()


def loop(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], power: int) -> list[Tensor]:
    """mean_m |∂L_m/∂θ|ᵖ as one would first write it: one forward and one backward pass a sample."""
    parameters = list(model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for m in range(len(x)):
        grads = torch.autograd.grad(loss(model(x[m : m + 1]), y[m : m + 1]), parameters)
        for t, g in zip(total, grads, strict=True):
            t += g.abs() if power == 1 else g.square()
    return [t / len(x) for t in total]


def _data(shape: tuple[int, ...], classes: int, samples: int, batch: int = 200) -> Batches:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(samples, *shape, generator=generator), torch.randint(classes, (samples,), generator=generator)
    return list(zip(x.split(batch), y.split(batch), strict=True))
