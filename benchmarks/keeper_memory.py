"""How much memory a keeper takes beside the model, method by method: counted bytes of tensors, in copies of the model's parameters.

    python benchmarks/keeper_memory.py --to results/bench/keeper-memory.json

For each method, a CIFAR network learns two small tasks. `held` is what the keeper's tensors take between two tasks, counted; `predicted`
is what `keeper.footprint()` says; `peak` is what `consolidate` takes at its peak as `footprint()` predicts it, without activations.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import selfless
from selfless.bench.hardware import describe_hardware
from selfless.models import build, hidden_activations
from selfless.preserve import PRESERVERS
from selfless.runner.memory import Count

OPTIONS: dict[str, dict[str, Any]] = {"ebll": {"steps": 2, "code": 2}, "replay": {"samples": 20}, "der": {"samples": 20}}


def measure(name: str, width: int, samples: int) -> dict[str, Any]:
    """Return the memory of one method in copies of the model, after two tasks."""
    torch.manual_seed(0)
    model = build(f"cnn-{width}", outputs=10, input_shape=(3, 32, 32), seed=0)
    layers = [*hidden_activations(model, conv=True), *hidden_activations(model)]
    tasks = [(torch.rand(samples, 3, 32, 32), torch.randint(10, (samples,))) for _ in range(2)]
    with Count() as count:
        keeper = selfless.attach(model, PRESERVERS[name](**OPTIONS.get(name, {})), layers=layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for task in tasks:
            for epoch in range(2):
                keeper.begin_epoch(epoch, 2, batches=1)
                loss = F.cross_entropy(model(task[0]), task[1]) + keeper.penalty(task)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
            predicted = keeper.footprint()
            del loss
            optimizer.zero_grad(set_to_none=True)
            keeper.consolidate([task])
            gc.collect()
        held = count.now
    found = keeper.footprint()
    return {
        "method": name,
        "held": held / found.model,
        "predicted": found.copies,
        "peak": predicted.peak_copies,
        "model_bytes": found.model,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256, help="units of the fully connected layer")
    parser.add_argument("--samples", type=int, default=16, help="images of a task")
    parser.add_argument("--only", nargs="*", help="methods", default=[name for name in PRESERVERS if name != "none"])
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    rows = []
    for name in given.only:
        rows.append(measure(name, given.width, given.samples))
        print(json.dumps(rows[-1]), file=sys.stderr)
    text = json.dumps({"hardware": describe_hardware(torch.device("cpu")), "network": f"cnn-{given.width}", "rows": rows}, indent=1)
    print(text)
    if given.to:
        given.to.parent.mkdir(parents=True, exist_ok=True)
        given.to.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
