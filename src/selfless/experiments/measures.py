"""The measures of an experiment on a finished run: numbers in percent (or counts), and the series that its figure needs.

Most measures read the recorded result. Activations and neuron importances come from the checkpoint: the network is built again and sees the
first task's images, or its stored α is read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from selfless import metrics
from selfless.spec import Result, Run

Floats = npt.NDArray[np.float64]
FIRST = "fc1.weight"  # the first layer's parameters
QUIET = 0.05  # a neuron whose mean activation on the first task is below this is near zero


class MissingCheckpoint(ValueError):
    """The checkpoint that a figure needs is not there; checkpoints are large and seldom kept with results."""


@dataclass(frozen=True)
class FinishedRun:
    """The result of a run, and the folder that holds its checkpoint."""

    result: Result
    out: Path
    data_dir: Path | None = None

    def checkpoint(self, run: Run | None = None) -> Path:
        """Return the checkpoint of this run, or of another run in the same folder."""
        path = self.out / (run or self.result.run).key / "checkpoint.safetensors"
        if not path.is_file():
            raise MissingCheckpoint(
                f"{path} is missing, and this figure is drawn from it. Copy it there, or make the whole experiment again, with its "
                "choices: selfless reproduce NAME --force"
            )
        return path


@dataclass(frozen=True)
class Measure:
    """`value` is the number of a finished run; `detail` is the other data that the figure needs, as plain JSON."""

    heading: str
    value: Callable[[FinishedRun], float]
    detail: Callable[[FinishedRun], Any]
    unit: str = "%"
    from_checkpoint: bool = False


def per_task(made: FinishedRun) -> list[float]:
    """Return the accuracy on each task after the last one."""
    return [float(v) for v in 100 * made.result.accuracy[-1]]


def free_after(made: FinishedRun) -> list[float]:
    """Return the share of first-layer weights with Ω < 1e-2 after each task: the paper's figure 4, top."""
    return [100 * float(after["parameters"][FIRST]) for after in made.result.capacity]


def _held_out_first(made: FinishedRun) -> float:
    if made.result.held_out is None:
        raise ValueError(f"{made.result.run.key} has no held-out accuracy; train it with held_out > 0")
    return 100 * float(made.result.held_out[0, 0])


def _all_columns(made: FinishedRun) -> Floats:
    if made.result.accuracy_all is None:
        raise ValueError(f"{made.result.run.stream} has no head wider than a task, so accuracy among all classes was not recorded")
    return 100 * made.result.accuracy_all


# ------------------------------------------------------------------------------------------------------- from the checkpoint
def first_activations(made: FinishedRun) -> list[float]:
    """Return each first-layer neuron's mean activation over the first task's training images, in the network at the end of the sequence."""
    run = made.result.run
    return _activations(run, made.checkpoint(), made.data_dir)


@functools.lru_cache(maxsize=64)  # the value and the detail of a cell are read one after the other
def _activations(run: Run, checkpoint: Path, data_dir: Path | None) -> list[float]:
    import torch
    from safetensors.torch import load_file

    from selfless.data import locate_weights as located
    from selfless.data import stream
    from selfless.models import build, hidden_activations

    tasks = stream(run.stream, tasks=run.tasks, seed=run.seed, held_out=run.held_out, data_dir=data_dir, **run.stream_options)
    options = located(run.model, run.model_options, data_dir)
    model = build(run.model, outputs=tasks.outputs, input_shape=tasks.input_shape, **options).eval()
    tensors = load_file(checkpoint)
    model.load_state_dict({n.removeprefix("params."): t for n, t in tensors.items() if n.startswith("params.")})
    kept: list[torch.Tensor] = []
    layer = model.get_submodule(hidden_activations(model)[0])
    handle = layer.register_forward_hook(lambda _m, _i, h: kept.append(h.sum(0)))
    part = tasks.tasks[0].train
    data = part.resident("cpu")
    with torch.no_grad():
        for rows in torch.arange(len(part)).split(5000):
            model(data.batch(rows)[0])
    handle.remove()
    return [float(v) for v in torch.stack(kept).sum(0) / len(part)]


def quiet(made: FinishedRun) -> float:
    """Return the share of first-layer neurons that are near zero on average."""
    return 100 * float(np.mean(np.array(first_activations(made)) < QUIET))


def importances(made: FinishedRun, tasks: int) -> list[float]:
    """Return α of the first hidden layer after the first `tasks` tasks, from the run that ended there.

    If all tasks share one head, that run is the beginning of this one.
    """
    from safetensors.numpy import load_file

    held = load_file(made.checkpoint(dataclasses.replace(made.result.run, tasks=tasks)))
    names = sorted(n for n in held if n.startswith("alpha."))
    return [float(v) for v in held[names[0]]]


def effective(alpha: list[float]) -> float:
    """(Σ α)² / Σ α²: how many neurons carry the importance. N if all have the same, 1 if one has it all."""
    a = np.array(alpha)
    return float(a.sum() ** 2 / np.square(a).sum()) if a.any() else 0.0


def reuse(made: FinishedRun) -> float:
    """cos(α₁, α₃ − α₂): how far the third task relies on the neurons of the first. α is summed over tasks."""
    first, second, third = (np.array(importances(made, t)) for t in (1, 2, 3))
    added = third - second
    length = np.linalg.norm(first) * np.linalg.norm(added)
    return 100 * float(first @ added / length) if length else 0.0


def reuse_by_chance(made: FinishedRun) -> float:
    """N ā b̄ / (‖a‖ ‖b‖), a = α₁, b = α₃ − α₂: the mean overlap if the third task's importances were spread over neurons at random.

    It is the mean of the cosine over all permutations of b, and rises with the density of a and b.
    """
    first, second, third = (np.array(importances(made, t)) for t in (1, 2, 3))
    return 100 * chance_overlap(first, third - second)


def chance_overlap(a: Floats, b: Floats) -> float:
    """Σa Σb / (N ‖a‖ ‖b‖): the mean of cos(a, b) over all permutations of b."""
    length = len(a) * np.linalg.norm(a) * np.linalg.norm(b)
    return float(a.sum() * b.sum() / length) if length else 0.0


def _lost(made: FinishedRun) -> float:
    """Return −backward transfer; 0.0, never −0.0, if nothing is lost."""
    return 0.0 - 100 * metrics.backward_transfer(made.result.accuracy)


def _nothing(made: FinishedRun) -> None:
    return None


def _tasks(made: FinishedRun) -> int:
    return made.result.run.tasks or len(made.result.baseline)


MEASURES: dict[str, Measure] = {
    "average": Measure("average", lambda m: 100 * m.result.average, per_task),
    "last-two": Measure("last two tasks", lambda m: float(np.mean(per_task(m)[-2:])), _nothing),
    "lost": Measure("lost on old tasks", _lost, _nothing, "points"),
    "own-model": Measure("own model", lambda m: 100 * metrics.learning_accuracy(m.result.accuracy), _nothing),
    "own-model-all": Measure("own model, of all classes", lambda m: float(_all_columns(m).diagonal().mean()), _nothing),
    "last-model-all": Measure("last model, of all classes", lambda m: float(_all_columns(m)[-1].mean()), _nothing),
    "free": Measure("free after task 1", lambda m: free_after(m)[0], free_after),
    "free-last": Measure("free at the end", lambda m: free_after(m)[-1], _nothing),
    "first-held-out": Measure("task 1, held out", _held_out_first, _nothing),
    "quiet": Measure(f"neurons with mean activation < {QUIET:g}", quiet, first_activations, from_checkpoint=True),
    "neurons": Measure(
        "effective neurons", lambda m: effective(importances(m, _tasks(m))), lambda m: importances(m, _tasks(m)), "count", True
    ),
    "reuse-beyond-chance": Measure(
        "overlap beyond chance", lambda m: reuse(m) - reuse_by_chance(m), reuse_by_chance, "points", from_checkpoint=True
    ),
    "reuse": Measure("overlap of tasks 1 and 3", reuse, _nothing, from_checkpoint=True),
}
