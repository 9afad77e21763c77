"""The cases that were measured. `measured.json` has the rows of each, and every row names its record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Inputs = Literal["same", "different"]
Heads = Literal["own", "shared"]


@dataclass(frozen=True)
class Case:
    """A kind of problem, and the runs that measured it.

    inputs    "same": all tasks draw their inputs from one distribution, as classes of one data set; "different": each task has its own
    heads     "own": a head for each task; "shared": one head for all
    augment   whether training images are shifted and mirrored
    tasks     how many tasks were learned
    run       settings that a recorded run of this case has
    """

    name: str
    title: str
    inputs: Inputs
    heads: Heads
    augment: bool
    tasks: int
    run: Mapping[str, Any]

    def holds(self, run: Mapping[str, Any]) -> bool:
        """Return whether a recorded run (`Run.as_dict`) belongs to this case; joint training does too."""
        recorded = dict(run) | {"stream": str(run["stream"]).removeprefix("joint-"), "scenario": run.get("scenario", "task")}
        recorded["tasks"] = run["tasks"] or self.tasks  # None: all tasks of the stream
        recorded["classes"] = run["stream_options"].get("classes_per_task")
        return all(recorded.get(name) == value for name, value in self.run.items())

    def distance(self, tasks: int | None) -> float:
        """Return how far a number of tasks is from the measured one, |log ratio|; 0 for None."""
        return 0.0 if tasks is None else abs(math.log(tasks / self.tasks))


_CIFAR = {"stream": "split-cifar-100", "model": "cnn-256", "tasks": 10, "classes": None, "scenario": "task", "select": "last"}
_TWENTY = {**_CIFAR, "tasks": 20, "classes": 5, "augment": "crop-flip"}
_MNIST = {"stream": "permuted-mnist", "model": "mlp-128", "tasks": 5, "scenario": "task", "select": "last", "augment": "none"}
_ON_CIFAR = "{} CIFAR-100 tasks (a convolutional network, a head each, {})"
CASES = (  # of those with the same inputs, heads and augmentation, the one to take if the number of tasks is not given comes first
    Case("pmnist", "five permuted-MNIST tasks (an MLP with 128 units, one head)", "different", "shared", False, 5, _MNIST),
    Case("cifar", _ON_CIFAR.format("ten", "no augmentation"), "same", "own", False, 10, {**_CIFAR, "augment": "none"}),
    Case("cifar-aug", _ON_CIFAR.format("ten", "crops and flips"), "same", "own", True, 10, {**_CIFAR, "augment": "crop-flip"}),
    Case("cifar-20", _ON_CIFAR.format("twenty", "crops and flips"), "same", "own", True, 20, _TWENTY),
)


def nearest(inputs: Inputs, heads: Heads, augment: bool, tasks: int | None = None) -> Case:
    """Return the case that agrees in the heads, then in the inputs, then in the number of tasks, then in the augmentation."""
    return max(CASES, key=lambda case: (case.heads == heads, case.inputs == inputs, -case.distance(tasks), case.augment == augment))
