"""How cost grows (part "growth"): a step with width, layers, tasks before it and the size of the fleet; importance with samples on disk.

seconds ∝ sizeᵏ; k is the slope of the least-squares line through (log size, log seconds), over the larger half of the sizes
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from selfless.bench.engine import EngineFleet, mlp, small_images
from selfless.bench.plan import Plan
from selfless.bench.table import Row, format_number, make_row
from selfless.bench.timing import free_bytes, time_call, time_in_turn
from selfless.data import Source

NUMBERS = {"cuda": 7, "cpu": 9}  # per parameter: θ, momentum, copies of both, gradient, Ω, θ*; on a CPU also c Ω/(1 + c Ω) and its copy
STEPS = {"cuda": 20, "cpu": 3}  # steps of one measurement
AXES = {  # what grows: (label of its axis, what is measured)
    "layers": ("hidden layers of 128 neurons", "step"),
    "tasks": ("tasks learnt before", "step"),
    "members": ("runs in the fleet", "step of the fleet"),
    "samples": ("samples of the task", "importance pass"),
    "width": ("neurons in each of two layers", "step"),
}


def run(plan: Plan) -> Iterator[Row]:
    """Yield the rows of each axis; the last one of an axis says the exponent. The widest network comes last: it takes the most time."""
    yield from _rows(plan, "layers", plan.growth_layers, lambda n: _step_seconds(plan, layers=n))
    yield from _rows_by_tasks(plan)
    yield from _rows(plan, "members", plan.growth_fleets, lambda n: _step_seconds(plan, members=n))
    yield from _rows(plan, "samples", plan.growth_samples, lambda n: _pass_seconds(plan, n))
    yield from _rows(plan, "width", plan.growth_widths, lambda n: _step_seconds(plan, width=n))


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Return k of seconds ∝ sizeᵏ over the larger half of the sizes; NaN for fewer than two points."""
    larger = sorted(points)[len(points) // 2 :] if len(points) > 3 else sorted(points)
    if len(larger) < 2:
        return math.nan
    x, y = ([math.log(point[i]) for point in larger] for i in (0, 1))
    return statistics.linear_regression(x, y).slope


def _rows(plan: Plan, axis: str, sizes: Sequence[int], measure: Any) -> Iterator[Row]:
    """Yield a row for each size. A network that does not fit in memory ends its axis."""
    points: list[tuple[float, float]] = []
    for size in sizes:
        plan.say(f"{axis}: {size:,}")
        try:
            rounds: list[float] | None = measure(size)
        except torch.cuda.OutOfMemoryError:
            rounds = None
        if rounds is None:
            yield make_row(_title(axis, size), says="does not fit in memory", kind="growth", axis=axis, size=size)
            break
        points.append((size, min(rounds)))
        yield _row(axis, points, rounds, size == sizes[-1])


def _row(axis: str, points: list[tuple[float, float]], rounds: list[float], is_last: bool) -> Row:
    size, seconds = points[-1]
    k = exponent(points)
    grown = f"{format_number(seconds / points[0][1])}× that of {points[0][0]:,}"
    says = f"{grown}; time ∝ size^{k:.2f} in the larger half" if is_last and len(points) > 1 else grown if len(points) > 1 else ""
    known = None if math.isnan(k) else k
    return make_row(_title(axis, int(size)), seconds, says=says, kind="growth", axis=axis, size=size, exponent=known, rounds=rounds)


def _title(axis: str, size: int) -> str:
    return f"{AXES[axis][1]}, {axis} {size:,}"


# --------------------------------------------------------------------------------------------------------------- what is measured
def _step_seconds(plan: Plan, width: int = 128, layers: int = 2, members: int = 1) -> list[float] | None:
    """Return the seconds of a step of MAS + SLNID in each round; None if the network does not fit in memory."""
    parameters = 785 * width + (layers - 1) * width * (width + 1) + 10 * (width + 1)
    if 4 * NUMBERS[plan.device.type] * members * parameters > free_bytes(plan.device):
        return None
    steps = STEPS[plan.device.type]
    with cheap_weights():
        fleet = EngineFleet(mlp(width), members, steps * plan.batch, plan.device, batch=plan.batch, layers=layers)
    rounds = time_in_turn({"step": fleet.train_epoch}, plan.growth_rounds, plan.device).rounds["step"]
    del fleet
    gc.collect()  # its parts refer to it
    if plan.device.type == "cuda":
        torch.cuda.empty_cache()
    return [seconds / steps for seconds in rounds]


def _rows_by_tasks(plan: Plan) -> Iterator[Row]:
    """Yield a row for each number of tasks; one network learns all of them. Tasks between are not trained, only consolidated."""
    steps, points = STEPS[plan.device.type], list[tuple[float, float]]()
    fleet = EngineFleet(mlp(), 1, steps * plan.batch, plan.device, batch=plan.batch, tasks_before=0)
    for tasks in plan.growth_tasks:
        plan.say(f"tasks: {tasks:,}")
        while fleet.task < tasks:
            fleet.begin_next_task()
        rounds = time_in_turn({"step": fleet.train_epoch}, plan.growth_rounds, plan.device).rounds["step"]
        rounds = [seconds / steps for seconds in rounds]
        points.append((tasks, min(rounds)))
        yield _row("tasks", points, rounds, tasks == plan.growth_tasks[-1])


def _pass_seconds(plan: Plan, samples: int) -> list[float]:
    """Return the seconds of the importance pass over `samples` images in a file; the first round reads them from the disk."""
    with tempfile.TemporaryDirectory(prefix="selfless-bench-") as folder:
        source = mapped_source(samples, Path(folder) / "images")
        fleet = EngineFleet(mlp(), 1, samples, plan.device, batch=plan.batch, tasks_before=0, source=source, budget=0)
        if samples == min(plan.growth_samples):
            fleet.consolidate()  # the first pass of all compiles and allocates
        rounds = [time_call(fleet.consolidate, plan.device) for _ in range(1 if samples >= 1_000_000 else plan.growth_rounds)]
        del fleet, source
    return rounds


# ------------------------------------------------------------------------------------------------------------------ large things
def mapped_source(samples: int, path: Path) -> Source:
    """Return `samples` images in a file that is mapped, not loaded; it is not in the cache of the system if that can be avoided."""
    images = small_images(mlp()).numpy()
    with path.open("wb") as file:
        for start in range(0, samples, len(images)):
            file.write(images[: samples - start].tobytes())
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c", shape=(samples, *images.shape[1:])))
    labels = torch.arange(samples) % 10
    return Source("mnist", (mapped, labels), (torch.from_numpy(images[:10]), torch.arange(10)), tuple("0123456789"), None, None)


@contextlib.contextmanager
def cheap_weights() -> Iterator[None]:
    """Repeat a million random numbers in the weights of linear layers: to draw 4·10⁹ of them would take minutes."""
    drawn = torch.rand(2**20, generator=torch.Generator().manual_seed(0)) * 2 - 1
    original = nn.Linear.reset_parameters

    def fill(layer: nn.Linear) -> None:
        if layer.weight.numel() < len(drawn) or layer.weight.is_meta:
            original(layer)
            return
        with torch.no_grad():
            _repeat(drawn / math.sqrt(layer.in_features), layer.weight.view(-1))
            if layer.bias is not None:
                layer.bias.zero_()

    nn.Linear.reset_parameters = fill  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Linear.reset_parameters = original  # type: ignore[method-assign]


def _repeat(values: Tensor, into: Tensor) -> None:
    whole = len(into) // len(values) * len(values)
    into[:whole].view(-1, len(values)).copy_(values)
    into[whole:].copy_(values[: len(into) - whole])
