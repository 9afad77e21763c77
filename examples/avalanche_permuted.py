"""Permuted MNIST in Avalanche: its strategy `Naive` alone, with its own MAS plugin, and with MAS and SLNID of this package.

    pip install 'selfless-learning[avalanche]'
    python examples/avalanche_permuted.py

Ω of Avalanche is |the gradient of a batch's mean|, which is smaller than the mean over samples that MAS defines, and it averages Ω over
tasks where MAS adds it up. So the two need different strengths. Those below were tried on these tasks: a demonstration, not evidence.
"""

import argparse
import contextlib
import io
import warnings

import torch
from torch import nn
from torch.utils.data import TensorDataset

warnings.filterwarnings("ignore")  # those of Avalanche's dependencies
from avalanche.benchmarks import benchmark_from_datasets  # noqa: E402
from avalanche.benchmarks.utils import AvalancheDataset  # noqa: E402
from avalanche.benchmarks.utils.data_attribute import DataAttribute  # noqa: E402
from avalanche.training.plugins import EvaluationPlugin, MASPlugin  # noqa: E402
from avalanche.training.supervised import Naive  # noqa: E402

import selfless.data  # noqa: E402
from selfless import MAS, SLNID  # noqa: E402
from selfless.integrations.avalanche import SelflessPlugin  # noqa: E402

PLUGINS = {
    "Naive": lambda: [],
    "Avalanche's MAS": lambda: [MASPlugin(lambda_reg=1.0, alpha=0.5)],
    "MAS + SLNID": lambda: [SelflessPlugin(MAS(0.1), SLNID(1e-3))],
}


Pair = tuple[TensorDataset, TensorDataset]  # train, test


def make_tasks(tasks: int, limit: int) -> list[Pair]:
    """Permuted MNIST, from the folder of data sets or fetched once; `limit` images of each part of a task."""
    stream = selfless.data.stream("permuted-mnist", tasks=tasks, limit=limit)
    return [(as_tensors(task.train), as_tensors(task.test)) for task in stream.tasks]


def as_tensors(part: selfless.data.Part) -> TensorDataset:
    return TensorDataset(torch.cat(list(part.chunks())).flatten(1) / 255, part.targets)


def for_avalanche(data: TensorDataset) -> AvalancheDataset:
    labels = data.tensors[1]
    targets = DataAttribute(labels.tolist(), "targets")
    tasks = DataAttribute([0] * len(labels), "targets_task_labels", use_in_getitem=True)
    return AvalancheDataset([data], data_attributes=[targets, tasks])


def learn(name: str, tasks: list[Pair], epochs: int, width: int) -> tuple[float, float]:
    """Return the average accuracy after the last task, and that of each task right after it was learned."""
    torch.manual_seed(0)
    benchmark = benchmark_from_datasets(train=[for_avalanche(train) for train, _ in tasks])
    inputs = tasks[0][0].tensors[0].shape[1]
    model = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    strategy = Naive(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=100,
        train_epochs=epochs,
        plugins=PLUGINS[name](),
        evaluator=EvaluationPlugin(),
    )
    learned = []
    for (_, test), experience in zip(tasks, benchmark.train_stream, strict=True):
        with contextlib.redirect_stdout(io.StringIO()):  # Avalanche prints every phase
            strategy.train(experience)
        learned.append(accuracy(model, test))
    return sum(accuracy(model, test) for _, test in tasks) / len(tasks), sum(learned) / len(tasks)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    return float((model(x).argmax(1) == y).float().mean())


def main(tasks: list[Pair], epochs: int = 3, width: int = 128) -> dict[str, float]:
    found = {}
    for name in PLUGINS:
        found[name], learned = learn(name, tasks, epochs, width)
        print(f"{name:16} average {found[name]:.1%} after {len(tasks)} tasks; each right after it was learned {learned:.1%}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for option, value in (("--tasks", 5), ("--epochs", 3), ("--limit", 10000), ("--width", 128)):
        parser.add_argument(option, type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    main(make_tasks(options.tasks, options.limit), options.epochs, options.width)
