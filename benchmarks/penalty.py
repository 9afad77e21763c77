"""The inhibition penalty, forward and backward, beside the N×N form and beside the training step it is added to."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.timing import interleaved, peak_bytes
from selfless import functional

BATCH = 200


def run(console: Console, quick: bool = False) -> list[dict[str, Any]]:
    table = Table(title=f"slnid, forward + backward, batch {BATCH}; the step is that of an MLP 784-N-N-10, with it on both layers")
    for column in (
        "N",
        "slnid ms",
        "N×N ms",
        "N×N / slnid",
        "step ms",
        "2 slnid / step",
        "step with slnid",
        "slnid peak MiB",
        "÷ M·N·4",
        "N×N peak MiB",
    ):
        table.add_column(column, justify="right")
    rows = []
    for n in (128, 512, 2048) if quick else (128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        row = _width(n, repeats=3 if quick else (9 if n <= 4096 else 5))
        rows.append(row)
        dense = row["dense_seconds"] is not None
        table.add_row(
            str(n),
            f"{1e3 * row['slnid_seconds']:.2f}",
            f"{1e3 * row['dense_seconds']:.2f}" if dense else "–",
            f"{row['dense_ratio']:.1f}" if dense else "–",
            f"{1e3 * row['step_seconds']:.1f}",
            f"{100 * row['share_of_step']:.1f} %",
            f"× {row['step_ratio_median']:.2f}",
            f"{row['slnid_peak_bytes'] / 2**20:.1f}",
            f"{row['slnid_peak_bytes'] / (4 * BATCH * n):.1f}",
            f"{row['dense_peak_bytes'] / 2**20:.1f}" if dense else "–",
        )
    console.print(table)
    return rows


def _width(n: int, repeats: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    h = torch.rand(BATCH, n, generator=generator).requires_grad_()
    alpha = torch.rand(n, generator=generator)
    fits = 4 * n * n * 4 < _memory() / 2  # the kernel, and the float64 steps on the way to it
    kernel = dense_kernel(n) if fits else None

    def ours() -> None:
        h.grad = None
        functional.slnid(h, alpha).backward()

    functions: dict[str, Callable[[], object]] = {"slnid": ours}
    peaks = {"slnid": peak_bytes(ours)}  # the first call: with the constants it makes and keeps
    if kernel is not None:
        functions["dense"] = lambda: dense(h, alpha, kernel)
        peaks["dense"] = peak_bytes(functions["dense"]) + kernel.nbytes
    functions["step"], functions["step with slnid"] = training_step(n, generator), training_step(n, generator, alpha)
    times = interleaved(functions, repeats)
    return {
        "n": n,
        "slnid_seconds": times.best("slnid"),
        "dense_seconds": times.best("dense") if fits else None,
        "dense_ratio": times.ratio("dense", "slnid") if fits else None,
        "step_seconds": times.best("step"),
        "share_of_step": 2 * times.ratio("slnid", "step"),  # two layers; at large N the ratio below is lost in the noise of the step
        "step_ratio": times.ratio("step with slnid", "step"),
        "step_ratio_median": times.paired("step with slnid", "step"),
        "slnid_peak_bytes": peaks["slnid"],
        "dense_peak_bytes": peaks.get("dense"),
        "rounds": times.rounds,
    }


def dense_kernel(n: int) -> Tensor:
    """K_ij = exp(−(i−j)²/2σ²), σ = N/6, zero diagonal: made once, as a careful N×N version would."""
    i = torch.arange(n, dtype=torch.float32)
    return torch.exp(-0.5 * ((i[:, None] - i) / (n / 6)) ** 2).fill_diagonal_(0)


def dense(h: Tensor, alpha: Tensor, kernel: Tensor) -> None:
    """The same penalty with the kernel written out: 1/M Σ_ij K_ij (d h)ᵢ (d h)ⱼ, d = exp(−α)."""
    h.grad = None
    x = h * torch.exp(-alpha)
    ((x @ kernel) * x).sum(1).mean().backward()


def training_step(n: int, generator: torch.Generator, alpha: Tensor | None = None) -> Callable[[], None]:
    """One SGD step of an MLP 784-N-N-10, with the penalty on both hidden layers if α is given."""
    first, second, head = nn.Linear(784, n), nn.Linear(n, n), nn.Linear(n, 10)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters(), *head.parameters()], lr=1e-3)
    x, y = torch.rand(BATCH, 784, generator=generator), torch.randint(10, (BATCH,), generator=generator)

    def step() -> None:
        optimizer.zero_grad()
        h1 = first(x).relu()
        h2 = second(h1).relu()
        loss = F.cross_entropy(head(h2), y)
        if alpha is not None:
            loss = loss + 1e-6 * (functional.slnid(h1, alpha) + functional.slnid(h2, alpha))
        loss.backward()
        optimizer.step()

    return step


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
