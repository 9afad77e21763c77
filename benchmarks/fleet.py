"""A fleet of whole permuted-MNIST sequences on a GPU, as one JSON: `python -m benchmarks.fleet --json PATH` (60 runs, about 20 s)."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from selfless import MAS, SLNID, NoSparsifier, Run
from selfless.engine.learner import Learner
from selfless.metrics import spread
from selfless.models import build
from selfless.runner.local import machine


def sequence(members: int, rounds: int) -> dict[str, Any]:
    """Seconds for `members` sequences of five tasks × ten epochs, exact importance and evaluation included, data loading apart."""
    kinds = (NoSparsifier(), SLNID(1e-3))
    runs = [Run(preserve=MAS(0.01), sparsify=kind, seed=s) for kind in kinds for s in range(members // 2)]
    seconds = []
    for _ in range(rounds):
        learner = Learner(runs, device="cuda")
        torch.cuda.synchronize()
        begun = time.perf_counter()
        results = learner.learn()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    averages = {k.name: spread([100 * r.average for r in results if r.run.sparsify == k]) for k in kinds}
    step = _step_seconds(learner)
    return {"members": members, "seconds": seconds, "step_ms": 1e3 * step, "run_step_us": 1e6 * step / members, "averages": averages}


def _step_seconds(learner: Learner) -> float:
    fleet = learner.fleet
    fleet.begin_epoch(0, 0)
    fleet.refresh_shares()
    graph = fleet._recorded(200)
    for count in (20, 300):
        fleet.cursor.zero_()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            fleet.cursor.zero_()
            graph.replay()
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count


def eager() -> float:
    """Seconds a step of one ordinary PyTorch run with the same work: gather, SLNID on both layers, momentum, explicit MAS penalty."""
    import selfless

    model = build("mlp-128", outputs=10, input_shape=(1, 28, 28), seed=0).cuda()
    keeper = selfless.attach(model, MAS(0.01), SLNID(1e-3), layers=list(model.hidden), check_finite=False)  # type: ignore[arg-type]
    x, y = torch.rand(6000, 1, 28, 28, device="cuda"), torch.randint(0, 10, (6000,), device="cuda")
    keeper.consolidate([(x[:200], y[:200])])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for count in (20, 300):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            rows = torch.randint(0, 6000, (200,), device="cuda")
            loss = F.cross_entropy(model(x[rows]), y[rows]) + keeper.penalty()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--members", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.fleet needs a GPU; on a CPU use: python -m benchmarks peers")
    one = eager()
    found = {"hardware": machine(), "command": f"python -m benchmarks.fleet --members {given.members} --rounds {given.rounds}"}
    found |= {"eager_step_ms": 1e3 * one, "fleet": sequence(given.members, given.rounds)}
    found["times_eager"] = one / (found["fleet"]["run_step_us"] / 1e6)  # type: ignore[index]
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
