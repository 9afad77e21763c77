"""What `keeper.penalty()` costs in an ordinary loop: its share of a step of an MLP 784-N-N-10, batch 256, MAS behind the optimizer.

    python benchmarks/eager_penalty.py --device cuda --out eager-penalty.json
    PYTHONPATH=OTHER/src python benchmarks/eager_penalty.py …        # another version of the library, for a comparison

`plain` is the loop without a keeper, `anchor` with a keeper and no penalty, `penalty` with both; `checked` also checks that the penalty is
finite, the default, which waits for the device; `inject` has inject=True, which adds the same gradient in the backward pass. All are
trained in turns; a time is the minimum over rounds, in µs. `share` is that of the penalty in a step that has a keeper, 1 − anchor/penalty,
`injected` that of inject=True; `all` is that of everything a keeper does, 1 − plain/penalty.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import selfless
from selfless import MAS, SLNID

WIDTHS = (128, 256, 512, 1024, 2048, 4096)


def make_step(kind: str, width: int, device: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return one training step, and a function that removes the keeper."""
    torch.manual_seed(0)
    x, y = torch.rand(256, 784, device=device), torch.randint(10, (256,), device=device)
    model = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    keeper = None
    if kind != "plain":
        keeper = selfless.attach(model, MAS(0.1), SLNID(1e-6), layers=["1", "3"], check_finite=kind == "checked", inject=kind == "inject")
        keeper.anchor_with(optimizer).consolidate([(x, y)])

    def step() -> None:
        loss = F.cross_entropy(model(x), y)
        if keeper is not None and kind in ("penalty", "checked"):
            loss = loss + keeper.penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step, keeper.detach if keeper is not None else lambda: None


def measure(width: int, device: str, rounds: int, steps: int) -> dict[str, float]:
    """Return the time of a step of each kind in µs, and the share of the penalty. Each kind is attached alone."""
    best = dict.fromkeys(("plain", "anchor", "penalty", "checked", "inject"), float("inf"))
    for _ in range(rounds):
        for kind in best:
            step, stop = make_step(kind, width, device)
            for _ in range(10):
                step()
            _wait(device)
            start = time.perf_counter()
            for _ in range(steps):
                step()
            _wait(device)
            best[kind] = min(best[kind], 1e6 * (time.perf_counter() - start) / steps)
            stop()
    shares = {"share": 1 - best["anchor"] / best["penalty"], "injected": 1 - best["anchor"] / best["inject"]}
    return {"n": width, **best, **shares, "all": 1 - best["plain"] / best["penalty"]}


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = [measure(width, options.device, options.rounds, options.steps) for width in options.widths]
    for row in rows:
        print(
            "  ".join(f"{key} {value:.2f}" if key in ("share", "injected", "all") else f"{key} {value:.0f}" for key, value in row.items())
        )
    if options.out:
        options.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
