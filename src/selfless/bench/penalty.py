"""SLNID by width: forward and backward beside the N×N form, and its share of the training step it is added to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from selfless import functional
from selfless.bench.eager import perceptron_step
from selfless.bench.plan import Plan
from selfless.bench.rig import Rig, mlp
from selfless.bench.rows import Row, aim, many, row, size
from selfless.bench.timing import Times, free_bytes, interleaved, peak
from selfless.preserve import NoPreserver
from selfless.sparsify import SLNID, NoSparsifier

BATCH = 256


def run(plan: Plan) -> Iterator[Row]:
    for n in plan.widths:
        alone = _formula(plan, n)
        yield alone
        yield _share(plan, n, alone["seconds"])


def _formula(plan: Plan, n: int) -> Row:
    """The penalty alone, forward and backward, against the same with the kernel written out."""
    plan.say(f"SLNID and N×N, N = {n:,}")
    generator = torch.Generator().manual_seed(0)
    h = torch.rand(BATCH, n, generator=generator).to(plan.device).requires_grad_()
    alpha = torch.rand(n, generator=generator).to(plan.device)
    repeats = 1 if plan.device.type == "cpu" else 20  # a GPU's clock needs more than one

    def ours() -> None:
        for _ in range(repeats):
            h.grad = None
            functional.slnid(h, alpha).backward()

    functions: dict[str, Callable[[], object]] = {"slnid": ours}
    _, held = peak(ours, plan.device)  # the first call: with the constants it makes and keeps
    dense_held = None
    if 4 * 4 * n * n < free_bytes(plan.device) / 2:  # the kernel, and the steps on the way to it
        kernel = dense_kernel(n, plan.device)

        def written_out() -> None:
            for _ in range(repeats):
                dense(h, alpha, kernel)

        functions["dense"] = written_out
        dense_held = peak(written_out, plan.device)[1] + kernel.nbytes
    times = interleaved(functions, _rounds(plan, n), plan.device)
    seconds = times.best("slnid") / repeats
    against: dict[str, Any] = {"dense_seconds": None, "times_dense": None, "dense_memory_bytes": dense_held}
    says = "N×N does not fit in memory"
    if dense_held is not None:
        against |= {"dense_seconds": times.best("dense") / repeats, "times_dense": times.ratio("dense", "slnid")}
        says = f"{many(against['times_dense'])}× as fast as N×N, which takes {size(dense_held)}"
    return row(
        f"SLNID, N = {n:,}",
        seconds,
        says=says,
        memory=held,
        n=n,
        kind="formula",
        **against,
        rounds=times.rounds,
        repeats=repeats,
        batch=BATCH,
    )


def _share(plan: Plan, n: int, alone: float) -> Row:
    """(step with − step without) / step with, on an MLP 784-N-N-10 without a preserver: in the engine, and in plain PyTorch.

    Where the step is long the difference drowns in its noise; twice the time of the penalty alone, one a layer, is then the better word.
    """
    title = f"training step, N = {n:,}, batch {BATCH}"
    plan.say(title)
    parameters = 4 * (n * n + 794 * n)
    if 12 * parameters > free_bytes(plan.device):  # two networks, each with gradients, momentum and what is on the way
        return row(title, says=f"does not fit in memory: it needs {size(12 * parameters)}", n=n, kind="share")
    steps = (100 if n <= 4096 else 20) if plan.device.type == "cuda" else max(1, min(8, 4096 // n))
    try:
        times = Times(_engine(plan, n, steps) | _eager(plan, n, steps))
    except torch.cuda.OutOfMemoryError:
        return row(title, says="out of memory", n=n, kind="share")
    share, eager = (1 - 1 / times.ratio(f"{side}with", f"{side}without") for side in ("", "eager "))
    direct = 2 * alone * steps / times.best("with")
    return row(
        title,
        times.best("with") / steps,
        rate=f"{many(steps / times.best('with'))} steps/s",
        says=f"SLNID is {100 * share:.1f} % of it ({100 * eager:.1f} % of an eager step; two alone: {100 * direct:.1f} %)",
        target=aim(100 * share, "≤", 5, " %") if n == 4096 else None,
        n=n,
        kind="share",
        share=share,
        share_median=1 - 1 / times.paired("with", "without"),
        share_direct=direct,
        share_eager=eager,
        share_eager_median=1 - 1 / times.paired("eager with", "eager without"),
        without_seconds=times.best("without") / steps,
        eager_with_seconds=times.best("eager with") / steps,
        eager_without_seconds=times.best("eager without") / steps,
        steps=steps,
        rounds=times.rounds,
    )


def _engine(plan: Plan, n: int, steps: int) -> dict[str, list[float]]:
    make: dict[str, Any] = {"preserve": NoPreserver(), "batch": BATCH}
    bare = Rig(mlp(n), 1, steps * BATCH, plan.device, sparsify=NoSparsifier(), **make)
    ours = Rig(mlp(n), 1, steps * BATCH, plan.device, sparsify=SLNID(1e-6), **make)
    return interleaved({"without": bare.epoch, "with": ours.epoch}, _rounds(plan, n), plan.device).rounds


def _eager(plan: Plan, n: int, steps: int) -> dict[str, list[float]]:
    alpha = torch.rand(n, generator=torch.Generator().manual_seed(0)).to(plan.device)
    bare, ours = perceptron_step(n, BATCH, plan.device), perceptron_step(n, BATCH, plan.device, alpha)
    functions = {"eager without": _repeated(bare, steps), "eager with": _repeated(ours, steps)}
    return interleaved(functions, _rounds(plan, n), plan.device).rounds


def _rounds(plan: Plan, n: int) -> int:
    """Small differences of short times need more rounds than long ones can afford."""
    if plan.quick:
        return plan.rounds
    return 2 * plan.rounds if plan.device.type == "cuda" or n <= 4096 else plan.rounds


def _repeated(step: Callable[[], None], steps: int) -> Callable[[], None]:
    def loop() -> None:
        for _ in range(steps):
            step()

    return loop


def dense_kernel(n: int, device: torch.device) -> Tensor:
    """K_ij = exp(−(i−j)²/2σ²), σ = N/6, zero diagonal: made once, as a careful N×N version would."""
    i = torch.arange(n, dtype=torch.float32, device=device)
    return torch.exp(-0.5 * ((i[:, None] - i) / (n / 6)) ** 2).fill_diagonal_(0)


def dense(h: Tensor, alpha: Tensor, kernel: Tensor) -> None:
    """The same penalty with the kernel written out: 1/M Σ_ij K_ij (d h)ᵢ (d h)ⱼ, d = exp(−α)."""
    h.grad = None
    x = h * torch.exp(-alpha)
    ((x @ kernel) * x).sum(1).mean().backward()
