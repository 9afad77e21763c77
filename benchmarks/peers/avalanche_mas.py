"""Time Avalanche's MAS on permuted MNIST: seconds per task-epoch, importance pass included.

It runs in `benchmarks/peers/.venv` (see README.md there), not in the environment of the project:

    benchmarks/peers/.venv/bin/python benchmarks/peers/avalanche_mas.py --data "$SELFLESS_DATA/mnist" --json

The result goes to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
Task = tuple[Any, Tensor, Tensor]  # an Avalanche experience, and the task's test images and labels
_LIBRARIES: list[torch.library.Library] = []  # kept, because torch removes the operators of a Library that is garbage-collected


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def import_torchvision() -> str:
    """Import torchvision and return its version.

    The plain index has only a CUDA build of torchvision. With a CPU torch its compiled part does not load, and the import then fails at two
    detection operators that are missing. Declaring the two lets the Python part import. Avalanche needs no more; nothing here calls them.
    """
    try:
        import torchvision
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)
        import torchvision
    return str(torchvision.__version__)


class Rows(Dataset[tuple[Tensor, int]]):
    """Pairs (image, label) in memory, split once, so that no item needs tensor indexing: the fastest form for Avalanche that was found."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.targets: list[int] = y.tolist()
        self.pairs = list(zip(x.unbind(0), self.targets, strict=True))

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.pairs[index]


class Stopwatch:
    """A plugin that notes when training ends. It comes before the plugin of MAS, whose importance pass starts at the same event."""

    trained_at = 0.0

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        self.trained_at = time.perf_counter()


def unzip(path: Path) -> bytes:
    if not path.is_file():
        sys.exit(f"{path} does not exist; --data must name the folder with MNIST's four .gz files")
    return gzip.decompress(path.read_bytes())


def idx(path: Path) -> np.ndarray:
    """Read an IDX file of bytes: two zeros, the type (8), the number of axes, their lengths, the data."""
    raw = unzip(path)
    if raw[:3] != b"\0\0\x08":
        sys.exit(f"{path} is not an IDX file of bytes")
    shape = np.frombuffer(raw, ">u4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(*shape)


def mnist(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Return x: (M, 784) in [0, 1] and y: (M,)."""
    images, labels = (idx(folder / name) for name in FILES[part])
    x = torch.tensor(images.reshape(len(images), -1), dtype=torch.float32) / 255
    return x, torch.tensor(labels, dtype=torch.int64)


def in_memory(options: argparse.Namespace) -> Iterator[Task]:
    """Yield tasks that are permuted once and kept as float rows. Task 1 is not permuted; the seed gives the other permutations."""
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.utils import as_classification_dataset

    generator = torch.Generator().manual_seed(options.seed)
    x, y = mnist(options.data, "train")
    test_x, test_y = mnist(options.data, "test")
    for task in range(options.tasks):
        perm = torch.randperm(784, generator=generator) if task else torch.arange(784)
        data = as_classification_dataset(Rows(x[:, perm], y))
        (experience,) = benchmark_from_datasets(train=[data]).train_stream
        yield experience, test_x[:, perm], test_y


def classic(options: argparse.Namespace) -> Iterator[Task]:
    """Yield the tasks of Avalanche's PermutedMNIST, which converts and permutes an image each time it is drawn."""
    from avalanche.benchmarks.classic import PermutedMNIST

    with tempfile.TemporaryDirectory() as root:
        raw = Path(root, "MNIST", "raw")
        raw.mkdir(parents=True)
        for name in chain(*FILES.values()):
            (raw / name.removesuffix(".gz")).write_bytes(unzip(options.data / name))
        benchmark = PermutedMNIST(options.tasks, seed=options.seed, train_transform=None, eval_transform=None, dataset_root=root)
    for train, test in zip(benchmark.train_stream, benchmark.test_stream, strict=True):
        x, y = next(iter(DataLoader(test.dataset.eval(), batch_size=len(test.dataset))))[:2]
        yield train, x, y


def mlp(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    return float((model(x).argmax(1) == y).double().mean())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torchvision_version = import_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Avalanche misses a QP solver, which MAS does not use
        import avalanche
        from avalanche.training import MAS
        from avalanche.training.plugins import EvaluationPlugin

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = mlp(options.hidden)
    if options.loading == "classic":
        model.insert(0, nn.Flatten())
    stopwatch = Stopwatch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "No loggers specified", which is intended
        evaluator = EvaluationPlugin()
    strategy = MAS(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum),
        criterion=nn.CrossEntropyLoss(),
        lambda_reg=options.strength,
        alpha=options.alpha,
        train_mb_size=options.batch,
        train_epochs=options.epochs,
        plugins=[stopwatch],
        evaluator=evaluator,
    )

    training: list[float] = []
    importance: list[float] = []
    cpu: list[float] = []
    steps: list[int] = []
    learned: list[float] = []
    tests: list[tuple[Tensor, Tensor]] = []
    tasks = classic(options) if options.loading == "classic" else in_memory(options)
    for experience, test_x, test_y in tasks:
        tests.append((test_x, test_y))
        before = strategy.clock.train_iterations
        cpu_start, start = time.process_time(), time.perf_counter()
        # The momentum starts at zero in every task, as in the released code of the paper
        strategy.train(experience, num_workers=0, reset_optimizer_state=True)
        end, cpu_end = time.perf_counter(), time.process_time()
        training.append(stopwatch.trained_at - start)
        importance.append(end - stopwatch.trained_at)
        cpu.append(cpu_end - cpu_start)
        steps.append(strategy.clock.train_iterations - before)
        learned.append(accuracy(model, test_x, test_y))
        say(
            f"task {len(tests)}/{options.tasks}: {training[-1]:.2f} s training, {importance[-1]:.2f} s importance, "
            f"{cpu[-1]:.2f} s of CPU, accuracy {learned[-1]:.4f}"
        )

    last = [accuracy(model, test_x, test_y) for test_x, test_y in tests]
    totals = [t + i for t, i in zip(training, importance, strict=True)]
    return {
        "peer": "avalanche-mas",
        "seconds_per_task_epoch": statistics.mean(totals) / options.epochs,
        "training_seconds_per_epoch": statistics.mean(training) / options.epochs,
        "importance_seconds_per_task": statistics.mean(importance),
        "training_seconds": training,
        "importance_seconds": importance,
        "cpu_seconds": cpu,
        "steps": steps,
        "accuracy": last,
        "average_accuracy": statistics.mean(last),
        "accuracy_when_learned": learned,
        "settings": {k: v for k, v in vars(options).items() if k not in ("data", "json", "check")},
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "cores": os.cpu_count(),
        "versions": {
            "avalanche": avalanche.__version__,
            "torch": torch.__version__,
            "torchvision": torchvision_version,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def check() -> None:
    """Check that everything needed can be imported."""
    version = import_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import avalanche
        import avalanche.training
    say(f"avalanche {avalanche.__version__}, torch {torch.__version__}, torchvision {version}: import")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with MNIST's four .gz files (default: $SELFLESS_DATA/mnist)")
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--lambda", dest="strength", type=float, default=0.1, help="strength of the penalty (0.1)")
    parser.add_argument("--alpha", type=float, default=0.5, help="share of the old importance at each update (0.5)")
    parser.add_argument("--loading", choices=("memory", "classic"), default="memory", help="see README.md")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="only check that Avalanche can be imported")
    options = parser.parse_args()
    if options.data is None and not options.check:
        if "SELFLESS_DATA" not in os.environ:
            parser.error("--data is missing, and SELFLESS_DATA is not set")
        options.data = Path(os.environ["SELFLESS_DATA"]) / "mnist"
    return options


def main() -> None:
    options = parse()
    if options.check:
        check()
        return
    result = measure(options)
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"avalanche {result['versions']['avalanche']} MAS: {result['seconds_per_task_epoch']:.2f} s a task-epoch "
        f"({result['training_seconds_per_epoch']:.2f} training + {result['importance_seconds_per_task']:.2f} importance "
        f"a task), {result['threads']} threads; average accuracy {result['average_accuracy']:.4f}"
    )


if __name__ == "__main__":
    main()
