"""The cases that were measured. `measured.json` has the rows of each, and every row names its record."""

from __future__ import annotations

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
        return "classes_per_task" not in run["stream_options"] and all(recorded.get(name) == value for name, value in self.run.items())


_CIFAR = {"stream": "split-cifar-100", "model": "cnn-256", "tasks": 10, "scenario": "task", "select": "last"}
_MNIST = {"stream": "permuted-mnist", "model": "mlp-128", "tasks": 5, "scenario": "task", "select": "last", "augment": "none"}
_ON_CIFAR = "ten CIFAR-100 tasks (a convolutional network, a head each, {})"
CASES = (
    Case("pmnist", "five permuted-MNIST tasks (a perceptron with 128 units, one head)", "different", "shared", False, 5, _MNIST),
    Case("cifar", _ON_CIFAR.format("no augmentation"), "same", "own", False, 10, {**_CIFAR, "augment": "none"}),
    Case("cifar-aug", _ON_CIFAR.format("crops and flips"), "same", "own", True, 10, {**_CIFAR, "augment": "crop-flip"}),
)


def nearest(inputs: Inputs, heads: Heads, augment: bool) -> Case:
    """Return the case that agrees in most of these; what heads there are counts twice, then inputs."""
    return max(CASES, key=lambda case: 4 * (case.heads == heads) + 2 * (case.inputs == inputs) + (case.augment == augment))
