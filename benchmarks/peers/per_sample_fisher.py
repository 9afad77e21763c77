"""Compute the Fisher information of an MLP in a loop over samples, with one forward and one backward pass for each.

G. M. van de Ven's continual-learning code, and much code after it, works in this way: batches of one sample, log-softmax, backward, square.
This file is a new implementation in plain PyTorch with nothing else in the loop. It runs in `benchmarks/peers/.venv`:

    benchmarks/peers/.venv/bin/python benchmarks/peers/per_sample_fisher.py --samples 2000 --json

`--labels true` squares the gradient at the true label (the empirical Fisher information). `--labels all` takes the expectation over the
model's distribution, with one backward pass per class (the exact Fisher information).
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def mlp(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def fisher(model: nn.Module, loader: DataLoader[Any], labels: str) -> dict[str, Tensor]:
    """mean_m (∂ log p(y_m|x_m)/∂θ)², by parameter name. With labels "all": mean_m Σ_c p_c (∂ log p_c/∂θ)²."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    seen = 0
    model.eval()
    for x, y in loader:
        logp = F.log_softmax(model(x), dim=1)
        classes = [(int(y), 1.0)] if labels == "true" else list(enumerate(logp.detach().exp()[0].tolist()))
        for k, (label, weight) in enumerate(classes):
            model.zero_grad()
            F.nll_loss(logp, torch.tensor([label])).backward(retain_graph=k + 1 < len(classes))
            for name, p in model.named_parameters():
                if p.grad is not None:
                    total[name] += weight * p.grad.detach() ** 2
        seen += 1
    return {name: value / seen for name, value in total.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--labels", choices=("true", "all"), default="true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = mlp(options.hidden)
    data = TensorDataset(torch.rand(options.samples + 20, 784), torch.randint(10, (options.samples + 20,)))
    warm, timed = torch.utils.data.random_split(data, [20, options.samples])
    fisher(model, DataLoader(warm, batch_size=1), options.labels)
    start = time.perf_counter()
    found = fisher(model, DataLoader(timed, batch_size=1, shuffle=True), options.labels)
    seconds = time.perf_counter() - start
    result = {
        "peer": "per-sample-fisher",
        "labels": options.labels,
        "samples": options.samples,
        "seconds": seconds,
        "seconds_per_sample": seconds / options.samples,
        "mean": float(torch.cat([f.flatten() for f in found.values()]).mean()),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    print(json.dumps(result) if options.json else f"{1e6 * result['seconds_per_sample']:.0f} µs a sample, labels: {options.labels}")


if __name__ == "__main__":
    main()
