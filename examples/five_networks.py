"""Five networks with strength "auto", beside strengths that were tuned for each: a perceptron, a CNN, a ResNet, a ViT, a text encoder.

Three tasks each: permuted images with one head (perceptron); turned images (CNN, ResNet, ViT) and texts on other topics, with a head each.
Tuned means the best pair of a grid on held-out data; "auto" is one setting for all five. Both are compared on test data.

    python examples/five_networks.py                             # drawn images, a small grid: about a minute
    python examples/five_networks.py --full --out auto.json      # MNIST, 20 pairs, five seeds: 150 runs
    python examples/five_networks.py --full --out auto.json --device cuda --workers 12

A run that was interrupted goes on where it stopped: finished trainings are kept in auto.json.runs.
"""

import argparse
import json
import platform
import statistics
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selfless
from selfless import MAS, SLNID

Data = tuple[Tensor, Tensor]
Job = tuple[str, int, float | str, float | str]  # a network, a seed, λ_Ω, λ
TASKS, WORDS, LENGTH, TUNING_SEED = 3, 200, 10, 100
ANCHORS, STRENGTHS = (0.01, 0.03, 0.1, 0.3, 1.0), (1e-4, 3e-4, 1e-3, 3e-3)  # the grid of tuned strengths


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1, self.act1 = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x))))))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.act, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)  # four heads of attention
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self, tokens: nn.Module, length: int, width: int = 24) -> None:
        super().__init__()
        self.tokens, self.place = tokens, nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks, self.norm = nn.Sequential(Block(width), Block(width)), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.tokens(x)
        tokens = tokens.flatten(2).transpose(1, 2) if tokens.dim() == 4 else tokens
        return self.norm(self.blocks(tokens + self.place)).mean(1)


class Heads(nn.Module):
    def __init__(self, body: nn.Module, width: int, heads: int) -> None:
        super().__init__()
        self.body, self.heads = body, nn.ModuleList(nn.Linear(width, 10) for _ in range(heads))

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.heads[task % len(self.heads)](self.body(x))


def mlp() -> Heads:
    return Heads(nn.Sequential(nn.Flatten(), nn.Linear(196, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()), 128, 1)


def cnn() -> Heads:
    first = (nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return Heads(nn.Sequential(*first, nn.Flatten(), nn.Linear(144, 64), nn.ReLU()), 64, TASKS)


def resnet() -> Heads:
    stem = (nn.Conv2d(1, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.ReLU())
    return Heads(nn.Sequential(*stem, Residual(16), nn.MaxPool2d(2), Residual(16), nn.AdaptiveAvgPool2d(1), nn.Flatten()), 16, TASKS)


def vit() -> Heads:
    return Heads(Encoder(nn.Conv2d(1, 24, 4, 4, padding=1), 16), 24, TASKS)


def text() -> Heads:
    return Heads(Encoder(nn.Embedding(WORDS, 24), LENGTH), 24, TASKS)


NETWORKS = {network.__name__: network for network in (mlp, cnn, resnet, vit, text)}


def draw_images(count: int, generator: torch.Generator) -> Data:
    """Return images (count, 1, 14, 14) of ten smooth patterns, with noise."""
    patterns = F.interpolate(torch.randn(10, 1, 5, 5, generator=torch.Generator().manual_seed(0)), size=(14, 14), mode="bilinear")
    y = torch.randint(10, (count,), generator=generator)
    return patterns[y] + 1.5 * torch.randn(count, 1, 14, 14, generator=generator), y


@cache
def read_images() -> tuple[Data, Data]:
    """Return the training and test images of MNIST, 14 × 14."""
    from selfless.data import stream

    task = stream("permuted-mnist", tasks=1).tasks[0]
    parts = [part.resident().batch(torch.arange(len(part))) for part in (task.train, task.test)]
    train, test = ((F.avg_pool2d(x.view(-1, 1, 28, 28), 2), y) for x, y in parts)
    return train, test


def make_tasks(name: str, seed: int, size: int, images: tuple[Data, Data] | None) -> list[list[Data]]:
    """Return [train, held out, test] of each task; `images` are those of MNIST, None for drawn ones."""
    g = torch.Generator().manual_seed(seed)
    tasks = []
    for t in range(TASKS):
        if name == "text":
            topics = (1.2 * torch.randn(10, WORDS, generator=g)).softmax(1)[:4]
            y = torch.randint(4, (3 * size,), generator=g)
            x = torch.multinomial(topics[y], LENGTH, replacement=True, generator=g)
        elif images is None:
            x, y = draw_images(3 * size, g)
        else:
            rows = [torch.randperm(len(part[1]), generator=g)[:n] for part, n in zip(images, (2 * size, size), strict=True)]
            x, y = (torch.cat([part[k][r] for part, r in zip(images, rows, strict=True)]) for k in (0, 1))
        if name == "mlp" and t:
            x = x.flatten(1)[:, torch.randperm(196, generator=g)].view_as(x)
        elif name != "text":
            x = x.rot90(t, (2, 3))
        tasks.append([(x[part], y[part]) for part in (slice(size), slice(size, 2 * size), slice(2 * size, None))])
    return tasks


def learn(name: str, tasks: list[list[Data]], preserve: MAS, strength: float | str, seed: int, epochs: int) -> dict[str, object]:
    """Learn the tasks one after another; return the average accuracy in % on held-out and on test data, and the strengths."""
    torch.manual_seed(seed)
    model, g = NETWORKS[name]().to(tasks[0][0][0].device), torch.Generator().manual_seed(seed)
    signed = name in ("vit", "text")  # GELU
    layers = [path for path, module in model.named_modules() if isinstance(module, nn.ReLU | nn.GELU)]
    keeper = selfless.attach(model, preserve, SLNID(strength, absolute=signed), layers)  # type: ignore[arg-type]
    for t, (train, _, _) in enumerate(tasks):
        adam = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0) if signed else None
        optimizer = adam or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        keeper.anchor_with(optimizer)
        for _ in range(epochs):
            for rows in torch.randperm(len(train[1]), generator=g).split(32):
                loss = F.cross_entropy(model(train[0][rows], t), train[1][rows]) + keeper.penalty()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        keeper.consolidate(list(zip(train[0][:200].split(100), train[1][:200].split(100), strict=True)), lambda m, b, t=t: m(b[0], t))
    with torch.no_grad():
        scores = [[100 * (model(x, t).argmax(1) == y).double().mean().item() for x, y in task[1:]] for t, task in enumerate(tasks)]
    held_out, test = (statistics.mean(column) for column in zip(*scores, strict=True))
    return {"held_out": held_out, "test": test, "seed": seed, "strengths": keeper.strengths}


def train_one(job: Job, settings: dict[str, Any]) -> dict[str, object]:
    """Train one network on the tasks of its seed; a worker process calls this too."""
    torch.set_num_threads(1)  # fastest for networks as small as these
    name, seed, anchor, strength = job
    images = read_images() if settings["full"] else None
    device = settings["device"]
    tasks = [[(x.to(device), y.to(device)) for x, y in task] for task in make_tasks(name, seed, settings["size"], images)]
    return {"job": job, **learn(name, tasks, MAS(anchor), strength, seed, settings["epochs"])}  # type: ignore[arg-type]


def train_all(jobs: list[Job], settings: dict[str, Any], workers: int, log: Path | None) -> dict[Job, dict[str, Any]]:
    """Train every job that is not in the log yet; return all results by job. Each result is added to the log at once."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log and log.exists() else []
    done = {tuple(one["job"]): one for one in lines if one["settings"] == settings}
    left = [job for job in jobs if job not in done]
    processes = ProcessPoolExecutor(workers, get_context("spawn")) if workers > 1 and left else None
    found = processes.map(train_one, left, [settings] * len(left)) if processes else (train_one(job, settings) for job in left)
    for one in found:
        done[tuple(one["job"])] = one  # type: ignore[arg-type]
        if log:
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**one, "settings": settings}) + "\n")
    if processes:
        processes.shutdown()
    return {job: done[job] for job in jobs}  # type: ignore[index]


def compare(name: str, chosen: tuple[float, float], found: dict[Job, dict[str, Any]], seeds: int) -> dict[str, object]:
    """Return and print the results of one network: the tuned strengths beside "auto", on the test data of each seed."""
    tuned = [found[name, seed, *chosen] for seed in range(seeds)]
    auto = [found[name, seed, "auto", "auto"] for seed in range(seeds)]
    gaps = [a["test"] - b["test"] for a, b in zip(auto, tuned, strict=True)]
    means = [statistics.mean(run["test"] for run in runs) for runs in (tuned, auto)]
    measured = "   ".join(f"{key}:{value:.2g}" for key, value in auto[0]["strengths"].items())
    print(f"{name:8}{means[0]:8.1f}{means[1]:8.1f}{statistics.mean(gaps):+8.1f}   mas:{chosen[0]:g}   slnid:{chosen[1]:g}   →   {measured}")
    grid = [
        {"mas": job[2], "slnid": job[3], "held_out": one["held_out"], "test": one["test"]}
        for job, one in found.items()
        if job[:2] == (name, TUNING_SEED)
    ]
    return {
        "network": name,
        "chosen": dict(zip(("mas", "slnid"), chosen, strict=True)),
        "tuned": tuned,
        "auto": auto,
        "gaps": gaps,
        "grid": grid,
    }


def main(arguments: list[str] | None = None) -> list[dict[str, object]]:
    parser = argparse.ArgumentParser(description='Five networks with strength "auto" beside tuned strengths.')
    parser.add_argument(
        "--full", action="store_true", help="MNIST, the whole grid and five seeds; otherwise drawn images, four pairs, one seed"
    )
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--seeds", type=int, help="how many seeds are compared on test data")
    parser.add_argument("--size", type=int, help="images or texts of each part of a task")
    parser.add_argument("--epochs", type=int, help="epochs per task")
    parser.add_argument("--anchors", type=float, nargs="+", help="the grid of λ_Ω")
    parser.add_argument("--strengths", type=float, nargs="+", help="the grid of λ")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes that train at the same time")
    parser.add_argument("--out", type=Path, help="write all numbers into this JSON file; runs in FILE.runs are not trained again")
    args = parser.parse_args(arguments)
    args.seeds = args.seeds or (5 if args.full else 1)
    args.anchors = args.anchors or (ANCHORS if args.full else (0.03, 0.3))
    args.strengths = args.strengths or (STRENGTHS if args.full else (1e-4, 1e-3))
    size, epochs = args.size or (2400 if args.full else 600), args.epochs or (3 if args.full else 6)
    settings = {"full": args.full, "size": size, "epochs": epochs, "device": args.device}
    log = args.out and args.out.with_name(args.out.name + ".runs")
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
    pairs = list(product(args.anchors, args.strengths))
    grid: list[Job] = [(name, TUNING_SEED, *pair) for name in args.networks for pair in pairs] if len(pairs) > 1 else []
    found = train_all(grid, settings, args.workers, log)
    chosen = {name: max(pairs, key=lambda p, n=name: found[n, TUNING_SEED, *p]["held_out"] if grid else 0) for name in args.networks}
    rest: list[Job] = [(n, seed, *pair) for n in args.networks for seed in range(args.seeds) for pair in (chosen[n], ("auto", "auto"))]
    found |= train_all(rest, settings, args.workers, log)
    print(f"average test accuracy in % after {TASKS} tasks; on the right the tuned strengths → those of auto with seed 0\n")
    print(f"{'':8}{'tuned':>8}{'auto':>8}{'gap':>8}")
    rows = [compare(name, chosen[name], found, args.seeds) for name in args.networks]
    if args.out:
        hardware = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or platform.machine()
        settings |= {"anchors": args.anchors, "strengths": args.strengths, "seeds": args.seeds}
        record = {"settings": settings, "tuning_seed": TUNING_SEED, "hardware": hardware, "torch": torch.__version__, "networks": rows}
        args.out.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()
