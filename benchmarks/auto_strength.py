"""Strength "auto" on five networks beside strengths that were tuned for each, all as one stack of networks on a GPU.

    python benchmarks/auto_strength.py --device cuda --workers 5 --out results/trials/auto/h200.json
    python benchmarks/auto_strength.py --quick                       # a minute on a CPU, to see that it works

Networks and tasks are those of examples/five_networks.py: three tasks each, MNIST or texts, 450 steps a task. `tune`: every pair of a
grid, and "auto" with several targets, with the tuning seeds, on held-out data; the tuned pair is the one with the best mean. `compare`:
the tuned pair and "auto", with other seeds, on test data; what is printed is of the target in the library. A finished network is not
trained again.

A stack trains many networks in one step (torch.func.vmap); the keeper's loop trains one. Formulas, importances and the measured strengths
are the library's; the step of SGD or AdamW and the implicit anchor are written out here, for all members at once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import five_networks as five

from selfless import MAS, SLNID, importance
from selfless.functional import samples
from selfless.functional.anchor import anchor_share
from selfless.functional.scale import TARGET, follow, scaled_strength, settle, start_scale

ANCHORS, STRENGTHS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0), (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
TARGETS = (0.25, 0.35, 0.5, 0.65)
TUNING, REPORTED = (100, 101, 102, 103), tuple(range(10))


@dataclass(frozen=True)
class Member:
    """One network of a stack: its seed and both strengths; None is "auto", with the target of R that it is raised to."""

    seed: int
    mas: float | None = None
    slnid: float | None = None
    target: float = TARGET


class Headed(nn.Module):
    """A network with the head of one task, for `selfless.importance`."""

    def __init__(self, model: nn.Module, task: int) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, self.task)  # type: ignore[no-any-return]


class Stack:
    """Networks of one kind with their tasks; `learn` trains them all, `accuracies` evaluates them."""

    def __init__(self, name: str, members: list[Member], size: int, device: str) -> None:
        self.members, self.device, self.signed = members, device, name in ("vit", "text")
        images = None if name == "text" or size < 1000 else five.read_images()
        by_seed = {seed: five.make_tasks(name, seed, size, images) for seed in dict.fromkeys(m.seed for m in members)}
        self.tasks = [
            [tuple(torch.stack([by_seed[m.seed][t][part][k] for m in members]).to(device) for k in (0, 1)) for part in range(3)]
            for t in range(five.TASKS)
        ]
        models = {seed: _build(name, seed) for seed in by_seed}
        self.model = models[members[0].seed].to(device)
        values = [dict(models[m.seed].named_parameters()) for m in members]
        self.theta = {n: torch.stack([v[n].detach().to(device) for v in values]) for n in values[0]}
        self.layers = [path for path, module in self.model.named_modules() if isinstance(module, nn.ReLU | nn.GELU)]
        self.term, self.heads = SLNID(1.0, absolute=self.signed), len(self.model.heads)  # type: ignore[arg-type]
        self.seen: list[Tensor] = []
        for path in self.layers:
            self.model.get_submodule(path).register_forward_hook(lambda _m, _i, h: self.seen.append(h))
        self.scale, self.target = start_scale(torch.zeros(len(members), device=device)), self._column("target")
        self.fixed = {kind: self._column(kind) for kind in ("mas", "slnid")}  # NaN is "auto"
        self.anchor_strength = self.fixed["mas"]
        self.alpha: list[Tensor] = []
        self.omega: dict[str, Tensor] = {}
        self.star: dict[str, Tensor] = {}

    def _column(self, key: str) -> Tensor:
        values = [getattr(member, key) for member in self.members]
        return torch.tensor([float("nan") if v is None else v for v in values], device=self.device)

    def _loss(
        self, theta: dict[str, Tensor], strength: Tensor, alpha: list[Tensor], x: Tensor, y: Tensor, task: int
    ) -> tuple[Tensor, Tensor]:
        """Return cross-entropy + λ Σ_l R_l of one member, and Σ_l R_l."""
        self.seen.clear()
        output = functional_call(self.model, theta, (x, task))
        sizes = [self.term.penalty(samples(h), alpha[i] if alpha else None) for i, h in enumerate(self.seen)]
        self.seen.clear()
        size = torch.stack(sizes).sum()
        return F.cross_entropy(output, y) + strength * size, size

    def learn(self, task: int, epochs: int) -> None:
        """Train all members on one task, then measure Ω and α."""
        x, y = self.tasks[task][0]
        count, step = y.shape[1], 0
        head = task % self.heads
        own = [n for n in self.theta if self.heads == 1 or not n.startswith("heads.") or n.startswith(f"heads.{head}.")]
        first, second = ({n: torch.zeros_like(self.theta[n]) for n in own} for _ in range(2))
        gradient = vmap(grad(self._loss, has_aux=True), in_dims=(0, 0, 0 if self.alpha else None, 0, 0, None))
        orders = {m.seed: torch.Generator().manual_seed(m.seed + 1000 * task) for m in self.members}
        everyone = torch.arange(len(self.members), device=self.device)[:, None]
        for _ in range(epochs):
            by_seed = {seed: torch.randperm(count, generator=g) for seed, g in orders.items()}
            order = torch.stack([by_seed[m.seed] for m in self.members]).to(self.device)
            for rows in order.split(32, dim=1):
                measured = scaled_strength(self.scale, self.term.share)
                strength = torch.where(self.fixed["slnid"].isnan(), measured, self.fixed["slnid"])
                found, sizes = gradient(self.theta, strength, self.alpha, x[everyone, rows], y[everyone, rows], task)
                if task == 0:
                    self.scale = follow(self.scale, sizes, self.target)
                step += 1
                for n in own:
                    self._update(n, found[n], first[n], second[n], step)
        if task == 0:
            self.scale = settle(self.scale)
        self._consolidate(task, own)

    def _update(self, name: str, gradient: Tensor, first: Tensor, second: Tensor, step: int) -> None:
        """Take one step of SGD or AdamW on a parameter, as the example, and the implicit anchor after it."""
        theta = self.theta[name]
        if self.signed:
            first.lerp_(gradient, 0.1)
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            size: Any = 3e-3 / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
            theta.sub_(size * first / (1 - 0.9**step))
        else:
            first.mul_(0.9).add_(gradient)
            theta.sub_(0.05 * first)
            size = 0.05 / (1 - 0.9)
        if name in self.omega:
            c = 2 * size * self.anchor_strength.view(-1, *[1] * (theta.dim() - 1))
            theta.lerp_(self.star[name], anchor_share(self.omega[name], c))

    def _consolidate(self, task: int, own: list[str]) -> None:
        """Add Ω and α of a task, from 200 of its samples; after the first, λ_Ω of "auto" is ρ / Σ Ω θ*²."""
        x, y = self.tasks[task][0]
        alone, found = Headed(self.model, task), []
        for k in range(len(self.members)):
            with torch.no_grad():
                for n, p in self.model.named_parameters():
                    p.copy_(self.theta[n][k])
            batches = [(x[k, rows], y[k, rows]) for rows in (slice(0, 100), slice(100, 200))]
            omega = importance.mas(alone, batches)
            alpha = importance.neurons(alone, batches, layers=[f"model.{path}" for path in self.layers])
            found.append((omega, [alpha[f"model.{path}"] for path in self.layers]))
            self.seen.clear()
        for n in own:
            new = torch.stack([omega[f"model.{n}"] for omega, _ in found])
            self.omega[n] = self.omega[n] + new if n in self.omega else new
            self.star[n] = self.theta[n].clone()
        alphas = [torch.stack([alpha[i] for _, alpha in found]) for i in range(len(self.layers))]
        self.alpha = [a + b for a, b in zip(self.alpha, alphas, strict=True)] if self.alpha else alphas
        if task == 0:
            size = torch.stack([(self.omega[n] * self.star[n].square()).flatten(1).sum(1) for n in own]).sum(0)
            self.anchor_strength = torch.where(self.fixed["mas"].isnan(), MAS("auto").share / size, self.fixed["mas"])

    def accuracies(self, part: int) -> list[float]:
        """Return the average accuracy over tasks of each member in %, on held-out data (1) or test data (2)."""
        found = []
        for t, task in enumerate(self.tasks):
            x, y = task[part]
            with torch.no_grad():
                output = vmap(lambda theta, x, t=t: functional_call(self.model, theta, (x, t)))(self.theta, x)
            self.seen.clear()
            found.append((output.argmax(-1) == y).double().mean(1))
        return [100 * value for value in torch.stack(found).mean(0).tolist()]


def _build(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return five.NETWORKS[name]()


def train(name: str, members: list[Member], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train a stack on all tasks; return each member with its accuracies and strengths."""
    stack = Stack(name, members, options.size, options.device)
    for task in range(five.TASKS):
        stack.learn(task, options.epochs)
    measured = scaled_strength(stack.scale, stack.term.share)
    inhibition = torch.where(stack.fixed["slnid"].isnan(), measured, stack.fixed["slnid"]).tolist()
    columns = zip(members, stack.accuracies(1), stack.accuracies(2), stack.anchor_strength.tolist(), inhibition, strict=True)
    return [asdict(m) | {"held_out": h, "test": t, "strengths": {"mas": a, "slnid": s}} for m, h, t, a, s in columns]


def study(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tune one network on held-out data, then compare it with "auto" on test data."""
    torch.set_num_threads(1)
    for backend in (
        torch.backends.cuda.enable_flash_sdp,
        torch.backends.cuda.enable_mem_efficient_sdp,
        torch.backends.cuda.enable_cudnn_sdp,
    ):
        backend(False)  # vmap has no rule for them
    pairs = list(itertools.product(options.anchors, options.strengths))
    grid = [Member(seed, *pair) for pair in pairs for seed in options.tuning]
    automatic = [Member(seed, target=target) for target in TARGETS for seed in options.tuning]
    tuned = train(name, grid + automatic, options)
    means = {p: statistics.mean(one["held_out"] for one in tuned if (one["mas"], one["slnid"]) == p) for p in pairs}
    chosen = max(pairs, key=lambda pair: means[pair])
    both = [Member(seed, *chosen) for seed in options.reported] + [Member(seed, target=t) for t in TARGETS for seed in options.reported]
    compared = train(name, both, options)
    split = len(options.reported)
    return {"network": name, "chosen": chosen, "tune": tuned, "tuned": compared[:split], "auto": compared[split:]}


def show(row: dict[str, Any]) -> str:
    """Return one line: tuned, auto, the gap with its standard error, the strengths; and "auto" by target on held-out data."""
    tuned, auto = [one["test"] for one in row["tuned"]], [one["test"] for one in row["auto"] if one["target"] == TARGET]
    gaps = [a - b for a, b in zip(auto, tuned, strict=True)]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
    targets = {t: statistics.mean(o["held_out"] for o in row["tune"] if o["mas"] is None and o["target"] == t) for t in TARGETS}
    best = max(
        statistics.mean(o["held_out"] for o in row["tune"] if (o["mas"], o["slnid"]) == pair)
        for pair in {(o["mas"], o["slnid"]) for o in row["tune"] if o["mas"] is not None}
    )
    by_target = "  ".join(f"{t:g}: {value - best:+.1f}" for t, value in targets.items())
    pair = f"mas:{row['chosen'][0]:g} slnid:{row['chosen'][1]:g}"
    means = f"{statistics.mean(tuned):8.1f}{statistics.mean(auto):8.1f}{statistics.mean(gaps):+8.1f} ± {error:.1f}"
    return f"{row['network']:8}{means}   {pair:22} held out, by target: {by_target}"


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(five.NETWORKS), choices=list(five.NETWORKS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="networks that are studied at the same time")
    parser.add_argument("--quick", action="store_true", help="drawn images, two pairs, one seed, one epoch")
    parser.add_argument("--out", type=Path, help="write all numbers into this JSON file")
    options = parser.parse_args(arguments)
    options.anchors, options.strengths = ((0.1,), (1e-4, 1e-3)) if options.quick else (ANCHORS, STRENGTHS)
    options.tuning, options.reported = (TUNING[:1], REPORTED[:2]) if options.quick else (TUNING, REPORTED)
    options.size, options.epochs = (300, 1) if options.quick else (2400, 6)
    rows = json.loads(options.out.read_text(encoding="utf-8"))["networks"] if options.out and options.out.exists() else []
    left = [name for name in options.networks if name not in {row["network"] for row in rows}]
    print(f"{'':8}{'tuned':>8}{'auto':>8}{'gap':>8}")
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as processes:
        for row in processes.map(study, left, [options] * len(left)):
            rows.append(row)
            if options.out:
                hardware = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
                settings = {key: getattr(options, key) for key in ("anchors", "strengths", "tuning", "reported", "size", "epochs")}
                record = {"settings": settings, "hardware": hardware, "torch": torch.__version__, "networks": rows}
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(record), encoding="utf-8")
    for row in rows:
        print(show(row))
    return rows


if __name__ == "__main__":
    main()
