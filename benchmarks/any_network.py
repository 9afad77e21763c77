"""Networks that `native` cannot run: a run in a fleet of 4 against the same run alone in an ordinary PyTorch loop with the keeper.

    PYTHONPATH=src python benchmarks/any_network.py --out any-network.json                # an H200
    PYTHONPATH=src python benchmarks/any_network.py --device cpu --models small_vit --members 2 --samples 40 --batch 20 --rounds 1

MAS behind the optimizer and SLNID, on drawn images of CIFAR's shape, in the second task. For each network and precision all ways run in
turns; a time is the minimum over rounds of an epoch, in ms a step of one run. The ways:

    eager    model, cross-entropy, keeper.penalty(), backward, SGD, implicit anchor; the images are on the device
    alone    the engine with one member
    vmap     a fleet, its members mapped by `vmap`
    turn     a fleet, its members in turn in one captured step; `lanes`: each on a stream of its own; `compiled`: with torch.compile

`whole` is a task from its start to its end, with the importance and without compilation. A row that is in the file already is not measured
again. The profile is of one epoch: how long the GPU was busy, the kernels that took most of the time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import selfless
from selfless import MAS, SLNID, Run
from selfless.bench.engine import cnn, synthetic_source
from selfless.data import offer
from selfless.engine import stack
from selfless.engine.learner import Learner
from selfless.models import build, hidden_activations

sys.path.insert(0, str(Path(__file__).parent))  # for networks.py and fleet_speed.py
from fleet_speed import is_kernel, kernel_table, profiler

WAYS = ("eager", "alone", "vmap", "turn", "lanes", "compiled")


def term() -> tuple[MAS, SLNID]:
    return MAS(1.0), SLNID(1e-6, absolute=True)


class Eager:
    """The ordinary loop."""

    def __init__(self, model: str, precision: str, options: argparse.Namespace) -> None:
        self.options, self.bf16 = options, precision == "bf16" and options.device == "cuda"
        self.model = build(f"networks:{model}", outputs=100, input_shape=(3, 32, 32), seed=0).to(options.device)
        layers = [*hidden_activations(self.model, conv=True), *hidden_activations(self.model)]
        self.keeper = selfless.attach(self.model, *term(), layers=list(dict.fromkeys(layers)), check_finite=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.keeper.anchor_with(self.optimizer)
        self.x = torch.randn(options.samples, 3, 32, 32, device=options.device)
        self.y = torch.arange(options.samples, device=options.device) % 10
        self.keeper.consolidate([(self.x[:8], self.y[:8])])

    def epoch(self) -> None:
        for rows in torch.randperm(len(self.x), device=self.x.device).split(self.options.batch):
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.bf16):
                logits = self.model(self.x[rows])
                loss = F.cross_entropy(logits[:, :10], self.y[rows]) + self.keeper.penalty()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def end_task(self) -> None:
        self.keeper.consolidate(zip(self.x.split(250), self.y.split(250), strict=True))


class Engine:
    """A fleet in the middle of its second task."""

    def __init__(self, model: str, precision: str, options: argparse.Namespace, way: str, members: int) -> None:
        stack.IN_TURN = way != "vmap"
        settings: dict[str, Any] = {"layers": "all", "batch": options.batch, "lr": 1e-3, "precision": precision, "epochs": 50}
        runs = [Run("split-cifar-100", f"networks:{model}", *term(), seed=seed, **settings) for seed in range(members)]
        data, self.source = f"drawn/{options.samples}", synthetic_source(cnn(), options.samples)
        offer(self.source, data_dir=data)
        self.learner = Learner(runs, device=options.device, data_dir=data)  # type: ignore[arg-type]  # only compared, never opened
        self.fleet, self.epochs = self.learner.fleet, 0
        self.fleet.stack.compiles = way == "compiled"
        self.fleet.stack.lanes.on = way in ("lanes", "compiled")
        self.data = self.learner.load([s.tasks[0].train for s in self.learner.streams])
        few = self.learner.load([s.evaluate[0].test for s in self.learner.streams])
        self.begin(few)
        self.fleet.consolidate()
        self.begin(self.data)

    def begin(self, data: Any) -> None:
        heads = self.learner.streams[0].heads
        self.fleet.begin_task(data, heads[0], self.learner.streams[0].outputs, [])

    def epoch(self) -> None:
        losses, _ = self.fleet.train_epoch(1, self.epochs)
        self.epochs += 1
        if not all(map(math.isfinite, losses)):
            raise RuntimeError(f"the loss on drawn images became {losses}, so the times would mean nothing")

    def end_task(self) -> None:
        self.fleet.consolidate()


def seconds(call: Callable[[], None], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(model: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the time of each way and its ratio to the eager loop."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    steps, found, loops = math.ceil(options.samples / options.batch), dict[str, Any](), dict[str, Any]()
    for way in options.ways:
        started = time.perf_counter()
        try:
            members = 1 if way in ("eager", "alone") else options.members
            loop = Eager(model, precision, options) if way == "eager" else Engine(model, precision, options, way, members)
            loop.epoch()
            loops[way] = loop
            found[way] = {"members": members, "first_epoch_s": time.perf_counter() - started, "ms": math.inf}
            if way not in ("eager", "alone", "vmap"):
                found[way]["captured"] = bool(loop.fleet.graphs)
        except Exception as error:  # one way that fails should not cost the others
            found[way] = {"error": repr(error)[:600]}
        print(model, precision, way, found[way], flush=True)
    for _ in range(options.rounds):
        for way, loop in loops.items():
            spent = 1e3 * seconds(loop.epoch, options.device) / steps / found[way]["members"]
            found[way]["ms"] = min(found[way]["ms"], spent)
    for way, loop in loops.items():
        found[way]["ratio"] = found["eager"]["ms"] / found[way]["ms"] if "eager" in loops else None
        if options.profile:
            with profiler() as prof:
                seconds(loop.epoch, options.device)
            spans = [(e.time_range.start, e.time_range.end, e.name) for e in prof.events() if is_kernel(e)]
            found[way]["profile"] = kernel_table(spans, steps)
        if options.whole:
            found[way]["end_of_task_s"] = seconds(loop.end_task, options.device) / found[way]["members"]
        print(f"{model} {precision} {way}: {found[way]['ms']:.2f} ms a step of a run, {found[way]['ratio']} x eager", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", default=["resnet18", "vit_tiny"], help="functions of networks.py")
    parser.add_argument("--precisions", nargs="+", choices=("bf16", "tf32"), default=["bf16", "tf32"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["eager", "alone", "vmap", "turn", "lanes"])
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2560)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--whole", action="store_true", help="also time the end of a task")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    settings = {k: str(v) for k, v in vars(options).items() if k != "out"}
    found: dict[str, Any] = {"device": device, "torch": torch.__version__, "settings": settings, "rows": {}}
    if options.out is not None and options.out.exists():
        found["rows"] = json.loads(options.out.read_text())["rows"]
    for model in options.models:
        for precision in options.precisions:
            if f"{model} {precision}" not in found["rows"]:
                found["rows"][f"{model} {precision}"] = measure(model, precision, options)
            if options.out is not None:
                options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
