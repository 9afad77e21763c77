"""Write the samples of this version: records, a packed archive and the states of keepers, a few kilobytes each.

    python tests/samples/make.py tests/samples/VERSION

Run it once for a new version and never again for an old one: tests/test_samples.py checks that what an old version wrote still loads.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

import selfless
from selfless import MAS, SLNID, Run
from selfless.runner.store import Store

TERMS = ("mas:0.5", "ewc:2", "si:1", "rwalk:0.5", "lwf:1", "imm:0.5", "packnet:0.5", "hat:0.5", "gpm:0.9", "der:0.5", "lwf:1+mas:0.1")


def network() -> nn.Sequential:
    """Return the network of the keepers, with the same weights each time."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(torch.sin(torch.arange(p.numel()) + i).view_as(p))
    return net


def task() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a task of two batches."""
    x = torch.cos(torch.arange(24.0)).view(8, 3)
    return [(x[:4], torch.tensor([0, 1, 0, 1])), (x[4:], torch.tensor([1, 1, 0, 0]))]


def train(keeper: selfless.Keeper, model: nn.Sequential, epochs: int = 2) -> None:
    """Train a task; do not end it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    keeper.anchor_with(optimizer)
    for epoch in range(epochs):
        keeper.begin_epoch(epoch, epochs, batches=2)
        for x, y in task():
            loss = nn.functional.cross_entropy(model(x), y) + keeper.penalty((x, y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def measure(keeper: selfless.Keeper, model: nn.Sequential) -> float:
    """Return a number that depends on the whole state of a keeper: the loss after another task that starts from the state."""
    torch.manual_seed(0)
    train(keeper, model)
    keeper.consolidate(task())
    with keeper.evaluating(0), torch.no_grad():
        return float(sum(model(x).square().sum() for x, _ in task()))


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    os.chdir(folder)
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(4), 6)
    x = (rng.integers(0, 256, (4, 1, 2, 2))[y] * rng.uniform(0.7, 1, (24, 1, 2, 2))).astype(np.uint8)
    np.savez_compressed("tasks.npz", x_train=x, y_train=y, x_test=x[::3], y_test=y[::3], task=y // 2, task_test=y[::3] // 2)
    runs = [
        Run(stream="arrays:tasks.npz", model="mlp-4", preserve=MAS(0.1), sparsify=SLNID(1e-3), epochs=9, lr=0.1, batch=8, seed=s)
        for s in (0, 1)
    ]
    results = selfless.train(runs, out="results", workers=1)
    selfless.train(runs[0].replace(preserve="ewc:1"), out="packed", workers=1, checkpoints=False)
    Store("packed").pack(remove=True)
    expected = {"accuracy": {r.run.key: r.accuracy.tolist() for r in results}, "keepers": {}}
    for text in TERMS:
        torch.manual_seed(0)
        model = network()
        keeper = selfless.attach(model, text, "slnid:1e-3")
        train(keeper, model)
        keeper.consolidate(task())
        name = text.replace(":", "-")
        weights = {f"model.{n}": p.detach().clone() for n, p in model.state_dict().items()}
        save_file({n: t.contiguous().clone() for n, t in keeper.state_dict().items()} | weights, f"keeper-{name}.safetensors")
        expected["keepers"][text] = measure(keeper, model)
    for lock in Path().rglob("lock"):
        lock.unlink()
    for file in Path().glob("*.safetensors"):
        file.chmod(0o644)
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
