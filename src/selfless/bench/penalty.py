"""SLNID by layer width: its time beside the N×N form, and its share of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from selfless import functional
from selfless.bench.eager import make_step
from selfless.bench.engine import EngineFleet, mlp
from selfless.bench.limits import copy_of
from selfless.bench.plan import Plan
from selfless.bench.table import Row, format_number, format_size, make_row, make_target
from selfless.bench.timing import Times, free_bytes, measure_memory, time_in_turn
from selfless.preserve import NoPreserver
from selfless.sparsify import SLNID, NoSparsifier

BATCH = 256


def run(plan: Plan) -> Iterator[Row]:
    """Yield two rows for each width: the formula alone, and the training step."""
    for n in plan.penalty_widths:
        formula = _formula_row(plan, n)
        yield formula
        yield _share_row(plan, n, formula["seconds"])


def _formula_row(plan: Plan, n: int) -> Row:
    """Compare the penalty alone, forward and backward, with the same penalty over an N×N matrix."""
    plan.say(f"SLNID and N×N, N = {n:,}")
    generator = torch.Generator().manual_seed(0)
    h = torch.rand(BATCH, n, generator=generator).to(plan.device).requires_grad_()
    alpha = torch.rand(n, generator=generator).to(plan.device)
    repeats = 1 if plan.device.type == "cpu" else 20  # one call is too short for the clock of a GPU

    def slnid() -> None:
        for _ in range(repeats):
            h.grad = None
            functional.slnid(h, alpha).backward()

    copy = copy_of(2 * h.numel(), plan.device)  # at the limit: h is read, its gradient is written

    def limit() -> None:
        for _ in range(repeats):
            copy()

    functions: dict[str, Callable[[], object]] = {"slnid": slnid, "limit": limit}
    _, slnid_bytes = measure_memory(slnid, plan.device)  # of the first call, which makes and keeps constants
    dense_bytes = None
    if 4 * 4 * n * n < free_bytes(plan.device) / 2:  # four float32 matrices: the kernel and the steps to compute it
        kernel = dense_kernel(n, plan.device)

        def dense() -> None:
            for _ in range(repeats):
                dense_slnid(h, alpha, kernel)

        functions["dense"] = dense
        dense_bytes = measure_memory(dense, plan.device)[1] + kernel.nbytes
    times = time_in_turn(functions, _rounds(plan, n), plan.device)
    figures: dict[str, Any] = {"dense_seconds": None, "times_dense": None, "dense_memory_bytes": dense_bytes}
    says = "N×N does not fit in memory"
    if dense_bytes is not None:
        figures |= {"dense_seconds": times.best("dense") / repeats, "times_dense": times.ratio("dense", "slnid")}
        says = f"{format_number(figures['times_dense'])}× as fast as N×N, which takes {format_size(dense_bytes)}"
    return make_row(
        f"SLNID, N = {n:,}",
        times.best("slnid") / repeats,
        says=says,
        memory=slnid_bytes,
        n=n,
        kind="formula",
        of_limit=times.ratio("limit", "slnid"),
        **figures,
        rounds=times.rounds,
        repeats=repeats,
        batch=BATCH,
    )


def _share_row(plan: Plan, n: int, penalty_seconds: float) -> Row:
    """share = (step with SLNID − step without) / step with SLNID, on an MLP 784-N-N-10 without a preserver: engine and plain PyTorch.

    In a long step this difference is smaller than the noise. `share_direct`, twice the time of the penalty alone (one per layer) over the
    time of the step, is the better estimate then.
    """
    title = f"training step, N = {n:,}, batch {BATCH}"
    plan.say(title)
    parameter_bytes = 4 * (n * n + 794 * n)
    if 12 * parameter_bytes > free_bytes(plan.device):  # two networks, each with gradients, momentum and temporary tensors
        return make_row(title, says=f"does not fit in memory: it needs {format_size(12 * parameter_bytes)}", n=n, kind="share")
    steps = (100 if n <= 4096 else 20) if plan.device.type == "cuda" else max(1, min(8, 4096 // n))
    try:
        times = Times(_engine_times(plan, n, steps) | _eager_times(plan, n, steps))
    except torch.cuda.OutOfMemoryError:
        return make_row(title, says="out of memory", n=n, kind="share")
    share, eager = (1 - 1 / times.ratio(f"{side}with", f"{side}without") for side in ("", "eager "))
    direct = 2 * penalty_seconds * steps / times.best("with")
    return make_row(
        title,
        times.best("with") / steps,
        rate=f"{format_number(steps / times.best('with'))} steps/s",
        says=f"SLNID is {100 * share:.1f} % of it ({100 * eager:.1f} % of an eager step; two alone: {100 * direct:.1f} %)",
        target=make_target(100 * share, "≤", 5, " %") if n == 4096 else None,
        n=n,
        kind="share",
        share=share,
        share_median=1 - 1 / times.median_ratio("with", "without"),
        share_direct=direct,
        share_eager=eager,
        share_eager_median=1 - 1 / times.median_ratio("eager with", "eager without"),
        without_seconds=times.best("without") / steps,
        eager_with_seconds=times.best("eager with") / steps,
        eager_without_seconds=times.best("eager without") / steps,
        steps=steps,
        rounds=times.rounds,
    )


def _engine_times(plan: Plan, n: int, steps: int) -> dict[str, list[float]]:
    make: dict[str, Any] = {"preserve": NoPreserver(), "batch": BATCH}
    without = EngineFleet(mlp(n), 1, steps * BATCH, plan.device, sparsify=NoSparsifier(), **make)
    with_slnid = EngineFleet(mlp(n), 1, steps * BATCH, plan.device, sparsify=SLNID(1e-6), **make)
    functions = {"without": without.train_epoch, "with": with_slnid.train_epoch}
    return time_in_turn(functions, _rounds(plan, n), plan.device).rounds


def _eager_times(plan: Plan, n: int, steps: int) -> dict[str, list[float]]:
    alpha = torch.rand(n, generator=torch.Generator().manual_seed(0)).to(plan.device)
    without, with_slnid = make_step(n, BATCH, plan.device), make_step(n, BATCH, plan.device, alpha)
    functions = {"eager without": _repeat(without, steps), "eager with": _repeat(with_slnid, steps)}
    return time_in_turn(functions, _rounds(plan, n), plan.device).rounds


def _rounds(plan: Plan, n: int) -> int:
    """Return twice the usual rounds where a step is short: a small difference of short times is noisy."""
    if plan.quick:
        return plan.rounds
    return 2 * plan.rounds if plan.device.type == "cuda" or n <= 4096 else plan.rounds


def _repeat(step: Callable[[], None], steps: int) -> Callable[[], None]:
    def loop() -> None:
        for _ in range(steps):
            step()

    return loop


def dense_kernel(n: int, device: torch.device) -> Tensor:
    """K_ij = exp(−(i−j)²/2σ²), σ = N/6, with zero diagonal: (N, N). A careful N×N version also computes it only once."""
    i = torch.arange(n, dtype=torch.float32, device=device)
    return torch.exp(-0.5 * ((i[:, None] - i) / (n / 6)) ** 2).fill_diagonal_(0)


def dense_slnid(h: Tensor, alpha: Tensor, kernel: Tensor) -> None:
    """1/M Σ_m Σ_ij K_ij (d h)ᵢ (d h)ⱼ, d = exp(−α), h: (M, N): the same penalty over the N×N kernel, forward and backward."""
    h.grad = None
    x = h * torch.exp(-alpha)
    ((x @ kernel) * x).sum(1).mean().backward()
