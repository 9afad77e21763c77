"""Where the time of a training step goes, for each method, in a fleet on a stream of the shape of CIFAR-100 or Tiny ImageNet.

    python benchmarks/fleet_speed.py --out fleet-speed.json                       # an H200: about two minutes
    python benchmarks/fleet_speed.py --rows lwf lwf+decov --augment crop-flip --out fleet-speed.json
    python benchmarks/fleet_speed.py --rows mas+slnid --augment none --model vgg-slim --layers hidden --samples 10000 --epochs 10 --tasks 3
    python benchmarks/fleet_speed.py --device cpu --members 2 --samples 40 --batch 20 --model cnn-8 --tasks 3 --rounds 1

To compare two versions, run the same file with PYTHONPATH at each of the two `src` folders; `selfless` is imported from there. The images
are drawn, so no data is needed and what is learnt means nothing. Sparsifiers act in all layers, with `--layers hidden` in fully-connected
ones. `--model vgg-slim` has tasks of twenty classes of images of 64×64. In GPM's protocol: `--model alexnet-cifar --precision tf32
--batch 64`.

A run is not trained to its end. A step is timed in the first task, in the second (one old head) and in the last one (all others are old),
and PackNet's also after pruning. Between the second and the last task the time is interpolated. Then

    seconds a run = (Σ_tasks epochs · steps · time of a step + tasks · time of ending a task) / members

which leaves out evaluation, compilation and the reading of data. Times are the minimum over rounds of one epoch each, with the GPU waited
for. The profile is of one more epoch: time and count of the kernels, and how long the GPU was busy between the first and the last of them.
`parts` is the GPU time below some functions of the engine, in steps that are not captured; `teacher` lies inside `distillation`. The
profiler does not see there what is launched outside of a PyTorch operation: the kernels of the update, of gathering, of a penalty.

`--whole EPOCHS` also trains three tasks of so many epochs from start to end, with everything that the sum above leaves out, and with a
tenth of the images held out and evaluated after every epoch; a step's share of that time is written beside the step alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch

import selfless
from selfless import EBLL, MAS, SLNID, DeCov, LwF, NoSparsifier, PackNet, Run
from selfless.bench.engine import cnn, synthetic_source, training_settings, vgg
from selfless.data import offer
from selfless.engine.fleet import Fleet
from selfless.engine.learner import Learner
from selfless.engine.native.options import CovarianceGradient, PairGradient
from selfless.engine.part import Part
from selfless.engine.stack import Stack
from selfless.engine.step import Step
from selfless.engine.update import Update

ROWS: dict[str, tuple[Any, Any]] = {
    "mas+slnid": (MAS(1.0), SLNID(3e-3)),
    "lwf": (LwF(1.0), NoSparsifier()),
    "lwf+decov": (LwF(1.0), DeCov(1e-3)),
    "packnet+slnid": (PackNet(0.5), SLNID(3e-3)),
    "packnet+decov": (PackNet(0.5), DeCov(1e-3)),
    "ebll": (EBLL(1.0), NoSparsifier()),
}
PARTS = {
    "batch": (Step, "batch"),
    "forward": (Stack, "forward"),
    "teacher": (Stack, "outputs"),
    "distillation": (Part, "distillation"),
    "backward": (Stack, "gradients"),
    "pair forms": (PairGradient, "add_to"),
    "covariances": (CovarianceGradient, "add_to"),
    "update": (Update, "__call__"),
    "project": (Part, "project"),
}
TOP = 15


def learner(row: str, augment: str, options: argparse.Namespace, **changes: Any) -> tuple[Learner, Any]:
    """Return the learner of a fleet, and the images, which are forgotten with this value."""
    preserve, sparsify = ROWS[row]
    chosen = {"schedule": "cosine", "layers": options.layers, "precision": options.precision, "augment": augment, "lr": 1e-3}
    settings = {"epochs": options.epochs, "batch": options.batch, **chosen, **changes}
    workload = vgg() if options.model == "vgg-slim" else cnn()
    runs = [Run(workload.stream, options.model, preserve, sparsify, seed=seed, **settings) for seed in range(options.members)]
    data = f"drawn/{options.samples}"  # a folder that does not exist: the images are offered under its name
    source = synthetic_source(workload, options.samples)
    offer(source, data_dir=data)
    return Learner(runs, device=options.device, data_dir=data), source  # type: ignore[arg-type]  # only compared, never opened


def whole(row: str, augment: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the milliseconds a step of `Learner.learn` on three tasks, evaluation and all."""
    found = {}
    for held_out in (0.0, 0.1):
        trained, _source = learner(row, augment, options, epochs=options.whole, tasks=3, held_out=held_out)
        started = time.perf_counter()
        results = trained.learn()
        spent = time.perf_counter() - started
        if any(r.status != "done" for r in results):
            raise RuntimeError(f"a run failed: {results[0].error}")
        steps = sum(math.ceil(len(task.train) / options.batch) for task in trained.streams[0].tasks) * options.whole
        found[f"held_out_{held_out}"] = 1e3 * spent / steps
    return found


class Bench:
    """A fleet of one method that walks through the tasks."""

    def __init__(self, row: str, augment: str, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        self.learner, self.source = learner(row, augment, options)
        self.fleet: Fleet = self.learner.fleet
        self.data = self.learner.load([stream.tasks[0].train for stream in self.learner.streams])
        self.heads = self.learner.streams[0].heads
        self.first = self.heads[0][0].start
        self.phase = next((e for e in range(2, options.epochs) if self.fleet.starts_phase(e)), None)

    @property
    def steps(self) -> int:
        return math.ceil(self.data.n / self.options.batch)

    def begin(self, task: int) -> None:
        past = [head for earlier in self.heads[1 : task + 1] for head in earlier]  # the data keeps the labels of the first head
        self.fleet.begin_task(self.data, self.heads[0], self.learner.streams[0].outputs, past)

    def epoch(self, task: int, epoch: int) -> float:
        """Train one epoch; return its seconds."""
        self.wait()
        started = time.perf_counter()
        losses, _ = self.fleet.train_epoch(task, epoch)
        self.wait()
        spent = time.perf_counter() - started
        if not all(map(math.isfinite, losses)):
            raise RuntimeError(f"the loss on drawn images became {losses}, so the times would mean nothing")
        return spent

    def time_step(self, task: int, epoch: int) -> float:
        """Return the milliseconds of a step of the whole fleet. The epoch before is not counted: it captures the step."""
        self.epoch(task, epoch)
        return 1e3 * min(self.epoch(task, epoch + k) for k in range(1, 1 + self.options.rounds)) / self.steps

    def end_task(self) -> float:
        """End the task; return the seconds."""
        self.wait()
        started = time.perf_counter()
        self.fleet.consolidate()
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measure(self) -> dict[str, Any]:
        options = self.options
        last, ends, tables = options.tasks - 1, list[float](), dict[str, Any]()
        for task in range(options.tasks):
            self.begin(task)
            for epoch in (0, 1):  # EBLL's warm-up ends after the first
                self.fleet.begin_epoch(task, epoch)
            if task in (0, 1, last):
                tables[f"step_ms_task_{task + 1}"] = self.time_step(task, 2)
            if task == last:
                tables["profile"] = self.profile(task, 5)
                tables["captured"], tables["native"] = bool(self.fleet.graphs), self.fleet.stack.native
                if self.phase is not None:
                    tables["step_ms_second_phase"] = self.time_step(task, self.phase)
                tables["parts_ms"] = self.parts(task, self.phase or 5)
            else:
                ends.append(self.end_task())
        later = sorted(ends[1:] or ends)  # the first one compiles
        tables["end_of_task_s"] = later[len(later) // 2]
        tables["seconds_a_run"] = self.seconds_a_run(tables)
        tables["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else None
        return tables

    def seconds_a_run(self, found: dict[str, Any]) -> float:
        count = self.options.tasks
        first, second, last = (found[f"step_ms_task_{k}"] for k in (1, 2, count))
        steps = [first, *(second + (last - second) * (k - 1) / max(1, count - 2) for k in range(1, count))]
        if self.phase is not None:  # its second phase has another step; the difference was measured in the last task
            share = 1 - self.phase / self.options.epochs
            steps = [ms + share * (found["step_ms_second_phase"] - last) for ms in steps]
        trained = sum(steps) / 1e3 * self.options.epochs * self.steps
        return (trained + count * found["end_of_task_s"]) / self.options.members

    # ------------------------------------------------------------------------------------------------------------------ profile
    def profile(self, task: int, epoch: int) -> dict[str, Any]:
        """Profile one epoch as it is trained."""
        with profiler() as prof:
            self.epoch(task, epoch)
        spans = [(e.time_range.start, e.time_range.end, e.name) for e in prof.events() if is_kernel(e)]
        return kernel_table(spans, self.steps)

    def parts(self, task: int, epoch: int) -> dict[str, Any]:
        """Return the milliseconds and calls a step of each part; the steps are not captured and measure κ as often as in training."""
        fleet = self.fleet
        fleet.begin_epoch(task, epoch)
        fleet.stack.module.train()
        count = min(10, self.steps)
        with named_parts():
            for number in range(min(3, self.steps)):
                fleet.step(self.options.batch, fleet.step.measures(number))
            fleet.begin_epoch(task, epoch)
            self.wait()
            with profiler() as prof:
                for number in range(100, 100 + count):
                    fleet.step(self.options.batch, fleet.step.measures(number))
                self.wait()
        found = {}
        for entry in prof.key_averages():
            name = entry.key.removeprefix("part: ")
            if entry.key.startswith("part: ") and entry.device_type == torch.autograd.DeviceType.CPU:
                spent = entry.device_time_total or (0.0 if self.device.type == "cuda" else entry.cpu_time_total)
                found[name] = {"ms": spent / 1e3 / count, "calls": entry.count / count}
        return found


def profiler() -> torch.profiler.profile:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return torch.profiler.profile(activities=kinds)


def is_kernel(event: Any) -> bool:
    return event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("part: ")


def kernel_table(spans: list[tuple[float, float, str]], steps: int) -> dict[str, Any]:
    """Return the time of all kernels, how long the GPU was busy, and the kernels that took the most time; times in ms a step."""
    if not spans:
        return {"note": "the profiler saw no kernel"}
    spent, count = defaultdict[str, float](float), defaultdict[str, int](int)
    busy, until = 0.0, -math.inf
    for start, end, name in sorted(spans):
        spent[name] += end - start
        count[name] += 1
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    top = sorted(spent, key=lambda name: -spent[name])[:TOP]
    return {
        "kernel_ms": sum(spent.values()) / 1e3 / steps,
        "kernels": len(spans) / steps,
        "busy_share": busy / (until - min(start for start, _, _ in spans)),
        "top": [{"name": name[:120], "ms": spent[name] / 1e3 / steps, "count": count[name] / steps} for name in top],
    }


@contextlib.contextmanager
def named_parts() -> Iterator[None]:
    """Inside `with`: the functions in PARTS are ranges of the profile."""
    plain = {name: (owner, method, getattr(owner, method)) for name, (owner, method) in PARTS.items() if hasattr(owner, method)}

    def ranged(name: str, function: Any) -> Any:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(f"part: {name}"):
                return function(*args, **kwargs)

        return call

    for name, (owner, method, function) in plain.items():
        setattr(owner, method, ranged(name, function))
    try:
        yield
    finally:
        for owner, method, function in plain.values():
            setattr(owner, method, function)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--augment", nargs="+", choices=("none", "crop-flip"), default=["crop-flip", "none"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="cnn-256")
    parser.add_argument("--layers", choices=("all", "hidden"), default="all", help="where the sparsifier acts")
    parser.add_argument("--precision", choices=("bf16", "tf32"), default="bf16")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=10, help="at least 3")
    parser.add_argument("--epochs", type=int, default=50, help="of a task, for the sum; at least 8")
    parser.add_argument("--samples", type=int, default=5000, help="images of a task")
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--whole", type=int, default=0, metavar="EPOCHS", help="also train three tasks of so many epochs to the end")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1 if options.device == "cpu" else torch.get_num_threads())  # as `selfless.train` has it
    device = torch.cuda.get_device_name() if options.device != "cpu" else "cpu"
    source = str(Path(selfless.__file__).parents[1])
    settings = {k: v for k, v in vars(options).items() if k not in ("out", "rows", "augment")}
    found: dict[str, Any] = {"device": device, "torch": torch.__version__, "source": source, "settings": settings, "rows": {}}
    for augment in options.augment:
        for row in options.rows:
            started = time.perf_counter()
            try:
                with training_settings():
                    table = Bench(row, augment, options).measure()
                    if options.whole:
                        table["whole_ms"] = whole(row, augment, options)
            except RuntimeError as error:  # one row that fails should not cost the others
                table = {"error": repr(error)}
            table["measured_in_s"] = time.perf_counter() - started
            found["rows"][f"{row} {augment}"] = table
            print_row(f"{row} {augment}", table)
            if options.out is not None:
                options.out.write_text(json.dumps(found, indent=1))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def print_row(name: str, table: dict[str, Any]) -> None:
    if "error" in table:
        print(f"{name}: {table['error']}", flush=True)
        return
    steps = {k.removeprefix("step_ms_"): round(v, 3) for k, v in table.items() if k.startswith("step_ms")}
    print(f"{name}: {table['seconds_a_run']:.2f} s a run, ms a step {steps}, end of a task {table['end_of_task_s']:.3f} s, ", end="")
    print(f"captured {table['captured']}, native {table['native']}, measured in {table['measured_in_s']:.0f} s")
    profile = table["profile"]
    if "top" in profile:
        print(f"    {profile['kernels']:.0f} kernels a step, {profile['kernel_ms']:.3f} ms, busy {profile['busy_share']:.1%}")
        for kernel in profile["top"]:
            print(f"    {kernel['ms']:.4f} ms  ×{kernel['count']:5.1f}  {kernel['name'][:90]}")
    if "whole_ms" in table:
        print(f"    whole runs, ms a step: {table['whole_ms']}")
    print("    " + ", ".join(f"{part} {of['ms']:.3f} ms ×{of['calls']:.1f}" for part, of in table["parts_ms"].items()), flush=True)


if __name__ == "__main__":
    main()
